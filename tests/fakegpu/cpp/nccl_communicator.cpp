// Communicators: how their members meet, split off smaller ones, and notice that one is gone.
#include "nccl_profiler.h"

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <map>

namespace fakegpu::nccl {

namespace {

struct CommunicatorRegistry {
    std::mutex mutex;
    std::map<void*, CommunicatorPtr> communicators;
};

CommunicatorRegistry& registry() {
    static auto* instance = new CommunicatorRegistry;
    return *instance;
}

// A killed process stays a zombie until its launcher reaps it.
bool is_process_gone(int pid) {
    char path[64];
    std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE* file = std::fopen(path, "r");
    if (!file) return true;
    char state = '?';
    const int fields = std::fscanf(file, "%*d (%*[^)]) %c", &state);
    std::fclose(file);
    return fields == 1 && (state == 'Z' || state == 'X');
}

} // namespace

CommunicatorPtr join(const std::string& name, const std::string& label, int size, int rank) {
    auto communicator = std::make_shared<Communicator>();
    communicator->name = name;
    communicator->label = label;
    communicator->rank = rank;
    communicator->size = size;
    communicator->device = current_device();
    communicator->segment = std::make_shared<Segment>(name, size, rank);
    communicator->profiler = Profiler::open(*communicator);
    return communicator;
}

CommunicatorPtr split(const CommunicatorPtr& parent, const std::string& label, int color, int key) {
    Segment& segment = *parent->segment;
    auto meet = [&] {
        const uint32_t target = ++parent->host_barriers;
        segment.rank(parent->rank).host_arrived = target;
        segment.notify();
        return wait_for_peers(*parent, [&] {
            for (int i = 0; i < parent->size; ++i) {
                if (segment.rank(i).host_arrived < target) return false;
            }
            return true;
        });
    };
    segment.rank(parent->rank).split_color = color;
    segment.rank(parent->rank).split_key = key;
    if (!meet()) return nullptr;
    std::vector<std::pair<int, int>> members; // (key, rank) of those with my color
    for (int i = 0; i < parent->size; ++i) {
        if (segment.rank(i).split_color == color) members.emplace_back(segment.rank(i).split_key, i);
    }
    // The next split may overwrite the colors only when all have read them.
    if (!meet()) return nullptr;
    const uint32_t child = ++parent->children;
    if (color < 0) return nullptr;
    std::sort(members.begin(), members.end());
    int rank = 0;
    while (members[rank].second != parent->rank) ++rank;
    char name[160];
    std::snprintf(name, sizeof name, "%s.%u.%d", parent->name.c_str(), child, color);
    return join(name, label, static_cast<int>(members.size()), rank);
}

bool has_dead_peer(Communicator& communicator) {
    for (int i = 0; i < communicator.size; ++i) {
        RankArea& area = communicator.segment->rank(i);
        if (i != communicator.rank && (area.gone == 2 || is_process_gone(area.pid))) return true;
    }
    return false;
}

bool wait_for_peers(Communicator& communicator, const std::function<bool()>& is_ready) {
    for (;;) {
        const uint32_t seen = communicator.segment->header().signal;
        if (communicator.is_aborted) return false;
        if (is_ready()) return true;
        communicator.segment->wait(seen);
    }
}

CommunicatorPtr find_communicator(void* handle) {
    std::lock_guard<std::mutex> lock(registry().mutex);
    auto found = registry().communicators.find(handle);
    return found == registry().communicators.end() ? nullptr : found->second;
}

void* add_communicator(CommunicatorPtr communicator) {
    std::lock_guard<std::mutex> lock(registry().mutex);
    void* handle = communicator.get();
    registry().communicators[handle] = std::move(communicator);
    return handle;
}

void remove_communicator(void* handle) {
    std::lock_guard<std::mutex> lock(registry().mutex);
    registry().communicators.erase(handle);
}

} // namespace fakegpu::nccl
