// Planted faults: what goes wrong, on which rank, at which call.
//
// A specification is `kind` or `kind:key=value,key=value`; several are separated by `;`. They come from FAKEGPU_FAULTS,
// from lines appended to the file FAKEGPU_CONTROL, or from the program (`fakegpu_plant`, see control.py).
#include "fakegpu.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>
#include <unistd.h>
#include <vector>

namespace fakegpu {

namespace {

struct Fault {
    std::string kind;
    std::map<std::string, long> numbers;

    long get(const char* key, long fallback) const {
        auto found = numbers.find(key);
        return found == numbers.end() ? fallback : found->second;
    }
};

struct FaultState {
    std::mutex mutex;
    std::vector<Fault> pending; // those with a call number, until it comes
    uint64_t collectives = 0;
    uint64_t launches = 0;
    long stall_from = -1;
    double slow_ms = 0;
    std::atomic<bool> spins{false};
    bool is_oom = false;
    long oom_after_bytes = -1;
    bool is_remote_error = false;
    bool is_garbage = false;
    int async_error = 0;
    std::atomic<uint64_t> release_generation{0};
};

// Returns the faults that are to happen now.
std::vector<Fault> plant_locked(FaultState& state, const std::string& text);
void act(const Fault& fault, Stream* stream);
void watch_control_file(FaultState* state, std::string path);

FaultState& faults() {
    static FaultState* instance = [] {
        auto* state = new FaultState;
        if (const char* text = std::getenv("FAKEGPU_FAULTS")) {
            std::lock_guard<std::mutex> lock(state->mutex);
            plant_locked(*state, text);
        }
        if (const char* path = std::getenv("FAKEGPU_CONTROL")) {
            std::thread(watch_control_file, state, std::string(path)).detach();
        }
        return state;
    }();
    return *instance;
}

Fault parse_fault(const std::string& text) {
    Fault fault;
    const size_t colon = text.find(':');
    fault.kind = text.substr(0, colon);
    if (colon == std::string::npos) return fault;
    std::istringstream pairs(text.substr(colon + 1));
    std::string pair;
    while (std::getline(pairs, pair, ',')) {
        const size_t equals = pair.find('=');
        if (equals != std::string::npos) {
            fault.numbers[pair.substr(0, equals)] = std::strtol(pair.c_str() + equals + 1, nullptr, 10);
        }
    }
    return fault;
}

bool has_trigger(const Fault& fault) {
    return fault.numbers.count("call") || fault.numbers.count("after") || fault.numbers.count("launch");
}

// Returns whether the fault is to happen now.
bool apply_locked(FaultState& state, const Fault& fault) {
    const std::string& kind = fault.kind;
    if (kind == "stall") {
        state.stall_from = fault.get("call", static_cast<long>(state.collectives) + 1);
    } else if (kind == "slow") {
        state.slow_ms = static_cast<double>(fault.get("ms", 100));
    } else if (kind == "spin") {
        state.spins = true;
    } else if (kind == "oom") {
        state.is_oom = true;
        state.oom_after_bytes = fault.get("after_mb", 0) << 20;
    } else if (kind == "remote_error") {
        state.is_remote_error = true;
    } else if (kind == "garbage") {
        state.is_garbage = true;
    } else if (kind == "release") {
        state.stall_from = -1;
        state.is_oom = false;
        ++state.release_generation;
    } else if (kind == "endless_kernel" || kind == "endless_wait" || kind == "sleep_kernel" ||
               kind == "vanish" || kind == "exit" || kind == "async_error") {
        if (!has_trigger(fault)) return true;
        state.pending.push_back(fault);
    } else if (!kind.empty()) {
        std::fprintf(stderr, "fakegpu: unknown fault '%s'\n", kind.c_str());
    }
    return false;
}

std::vector<Fault> plant_locked(FaultState& state, const std::string& text) {
    std::vector<Fault> now;
    std::istringstream parts(text);
    std::string part;
    while (std::getline(parts, part, ';')) {
        const size_t begin = part.find_first_not_of(" \t\n");
        if (begin == std::string::npos) continue;
        const size_t end = part.find_last_not_of(" \t\n");
        const Fault fault = parse_fault(part.substr(begin, end - begin + 1));
        const long rank = fault.get("rank", -1);
        const bool is_mine = rank < 0 || rank == process_rank();
        if (is_mine && apply_locked(state, fault)) now.push_back(fault);
    }
    return now;
}

void watch_control_file(FaultState* state, std::string path) {
    std::streamoff offset = 0;
    for (;; std::this_thread::sleep_for(std::chrono::milliseconds(100))) {
        std::ifstream file(path);
        if (!file) continue;
        file.seekg(offset);
        std::string line;
        while (std::getline(file, line) && !file.eof()) {
            offset += static_cast<std::streamoff>(line.size()) + 1;
            std::vector<Fault> now;
            {
                std::lock_guard<std::mutex> lock(state->mutex);
                now = plant_locked(*state, line);
            }
            set_current_device(last_device()); // that of the program's thread
            for (const Fault& fault : now) act(fault, resolve_stream(nullptr));
        }
        wake_waiters();
    }
}

// Removes and returns the pending faults whose `key` has been reached.
std::vector<Fault> take_due(FaultState& state, const char* key, uint64_t count) {
    std::vector<Fault> due;
    std::vector<Fault> later;
    for (const Fault& fault : state.pending) {
        const long at = fault.get(key, -1);
        (at >= 0 && static_cast<uint64_t>(at) <= count ? due : later).push_back(fault);
    }
    state.pending = later;
    return due;
}

// Negative: endless.
double kernel_ms(const Fault& fault) {
    return fault.kind == "endless_kernel" ? -1 : static_cast<double>(fault.get("ms", 1000));
}

void act(const Fault& fault, Stream* stream) {
    if (fault.kind == "vanish") kill(getpid(), SIGKILL);
    if (fault.kind == "exit") _exit(static_cast<int>(fault.get("status", 1)));
    if (fault.kind == "async_error") faults().async_error = static_cast<int>(fault.get("code", 6));
    const bool is_kernel = fault.kind == "sleep_kernel" || fault.kind == "endless_kernel";
    if (is_kernel) launch_blocked(stream, kernel_ms(fault));
    if (fault.kind == "endless_wait") wait_event(stream, std::make_shared<EventState>());
}

} // namespace

int process_rank() {
    static const int rank = [] {
        const char* text = std::getenv("RANK");
        return text && *text ? static_cast<int>(std::strtol(text, nullptr, 10)) : -1;
    }();
    return rank;
}

Task make_blocked_kernel(double milliseconds) {
    const uint64_t generation = faults().release_generation;
    const double until = now_ms() + milliseconds;
    return [generation, milliseconds, until] {
        const double started = now_ms();
        block_until([=] {
            if (faults().release_generation != generation) return true;
            return milliseconds >= 0 && now_ms() >= std::max(until, started + milliseconds);
        });
    };
}

void launch_blocked(Stream* stream, double milliseconds) {
    if (is_capturing(stream)) { // each launch of the graph blocks anew, until it is released
        capture_node(stream, [milliseconds] { return make_blocked_kernel(milliseconds); }, true);
        return;
    }
    enqueue(stream, make_blocked_kernel(milliseconds), false);
}

void count_launch(Stream* stream) {
    FaultState& state = faults();
    std::vector<Fault> due;
    {
        std::lock_guard<std::mutex> lock(state.mutex);
        ++state.launches;
        if (!state.pending.empty()) due = take_due(state, "launch", state.launches);
    }
    for (const Fault& fault : due) act(fault, stream);
}

CollectivePlan plan_collective(bool is_replay) {
    FaultState& state = faults();
    std::vector<Fault> due;
    CollectivePlan plan;
    {
        std::lock_guard<std::mutex> lock(state.mutex);
        ++state.collectives;
        due = take_due(state, "call", state.collectives);
        plan.is_stalled = state.stall_from >= 0 && state.collectives >= static_cast<uint64_t>(state.stall_from);
        plan.delay_ms = state.slow_ms;
    }
    for (const Fault& fault : due) {
        const bool is_kernel = fault.kind == "endless_kernel" || fault.kind == "sleep_kernel";
        if (is_replay && is_kernel) plan.kernel_before = make_blocked_kernel(kernel_ms(fault));
        else act(fault, resolve_stream(nullptr));
    }
    return plan;
}

void after_collective() {
    FaultState& state = faults();
    std::vector<Fault> due;
    {
        std::lock_guard<std::mutex> lock(state.mutex);
        due = take_due(state, "after", state.collectives);
    }
    for (const Fault& fault : due) act(fault, resolve_stream(nullptr));
}

bool spins_in_synchronize() { return faults().spins; }
uint64_t stall_generation() { return faults().release_generation; }
bool is_stall_released(uint64_t generation) { return faults().release_generation != generation; }
int injected_async_error() { return faults().async_error; }
bool reports_remote_error() { return faults().is_remote_error; }
bool is_garbage_on_mismatch() { return faults().is_garbage; }

bool is_allocation_refused(size_t size, int device) {
    FaultState& state = faults();
    std::lock_guard<std::mutex> lock(state.mutex);
    return state.is_oom && static_cast<long>(allocated_bytes(device) + size) > state.oom_after_bytes;
}

} // namespace fakegpu

// --- for programs: control.py calls these ---

FAKEGPU_API void fakegpu_plant(const char* specification) {
    auto& state = fakegpu::faults();
    std::vector<fakegpu::Fault> now;
    {
        std::lock_guard<std::mutex> lock(state.mutex);
        now = fakegpu::plant_locked(state, specification);
    }
    for (const auto& fault : now) fakegpu::act(fault, fakegpu::resolve_stream(nullptr));
    fakegpu::wake_waiters();
}

FAKEGPU_API void fakegpu_launch_blocked(void* stream, double milliseconds) {
    fakegpu::launch_blocked(fakegpu::resolve_stream(stream), milliseconds);
}

FAKEGPU_API void fakegpu_wait_never_recorded(void* stream) {
    fakegpu::wait_event(fakegpu::resolve_stream(stream), std::make_shared<fakegpu::EventState>());
}

FAKEGPU_API unsigned long fakegpu_collectives() {
    auto& state = fakegpu::faults();
    std::lock_guard<std::mutex> lock(state.mutex);
    return state.collectives;
}

FAKEGPU_API unsigned long fakegpu_launches() {
    auto& state = fakegpu::faults();
    std::lock_guard<std::mutex> lock(state.mutex);
    return state.launches;
}
