// An NCCL profiler plugin for tests: counts the events of each communicator, and writes a line of JSON when it goes.
//
// COUNTING_PROFILER_FILE names the file, to which all processes append. COUNTING_PROFILER_MASK selects events (default: all
// that the stand-ins have), COUNTING_PROFILER_REFUSES=1 makes the plugin fail to initialize.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <unistd.h>

namespace {

constexpr uint64_t kCollective = 2;
constexpr uint64_t kMessage = 4;
constexpr uint64_t kKernel = 64;
constexpr uint64_t kCollectiveCall = 512;
constexpr uint64_t kMessageCall = 1024;
constexpr int kKinds = 12; // bits of the mask
constexpr int kDefaultMask = 1 | 2 | 4 | 64 | 256 | 512 | 1024 | 2048;
constexpr int kKernelStop = 22;

struct Event;

// The part of an event's description that is read here.
struct Description {
    uint64_t type;
    Event* parent;
    int rank;
    union {
        struct {
            const char* function;
            size_t count;
            const char* dtype;
            int root;
            void* stream;
            bool is_captured;
        } collective_call;
        struct {
            const char* function;
            size_t count;
            const char* dtype;
            void* stream;
            bool is_captured;
        } message_call;
    };
};

struct Context {
    uint64_t id;
    char name[64];
    int rank;
    int ranks;
    int interface;
    std::atomic<int> started[kKinds];
    std::atomic<int> stopped;
    std::atomic<int> kernels_ended;
    std::atomic<int> captured_calls;
    std::atomic<int> orphans; // kernels whose parent is no collective or message of this communicator
};

struct Event {
    Context* context;
    uint64_t type;
};

int environment_number(const char* name, int fallback) {
    const char* text = std::getenv(name);
    return text ? static_cast<int>(std::strtol(text, nullptr, 0)) : fallback;
}

int begin(void** context, int* mask, const char* name, uint64_t id, int ranks, int rank, int interface) {
    if (environment_number("COUNTING_PROFILER_REFUSES", 0)) return 1;
    auto* created = new Context{};
    created->id = id;
    std::snprintf(created->name, sizeof created->name, "%s", name ? name : "");
    created->rank = rank;
    created->ranks = ranks;
    created->interface = interface;
    *mask = environment_number("COUNTING_PROFILER_MASK", kDefaultMask);
    *context = created;
    return 0;
}

int init_v4(void** context, int* mask, const char* name, uint64_t id, int, int ranks, int rank, void*) {
    return begin(context, mask, name, id, ranks, rank, 4);
}
int init_v5(void** context, uint64_t id, int* mask, const char* name, int, int ranks, int rank, void*) {
    return begin(context, mask, name, id, ranks, rank, 5);
}
int init_v6(void** context, uint64_t id, int* mask, const char* name, int, int ranks, int rank, void*) {
    return begin(context, mask, name, id, ranks, rank, 6);
}

// Handles are never freed, as a kernel may end after its collective was stopped.
int start(void* pointer, void** handle, const Description* description) {
    auto* context = static_cast<Context*>(pointer);
    const uint64_t type = context->interface == 4 ? description->type & 0xff : description->type;
    for (int kind = 0; kind < kKinds; ++kind) {
        if (type == uint64_t(1) << kind) ++context->started[kind];
    }
    if (type == kCollectiveCall && description->collective_call.is_captured) ++context->captured_calls;
    if (type == kMessageCall && description->message_call.is_captured) ++context->captured_calls;
    if (type == kKernel) {
        const Event* parent = description->parent;
        const bool is_known = parent && parent->context == context && (parent->type == kCollective || parent->type == kMessage);
        if (!is_known) ++context->orphans;
    }
    *handle = new Event{context, type};
    return 0;
}

int stop(void* handle) {
    ++static_cast<Event*>(handle)->context->stopped;
    return 0;
}

int record(void* handle, int state, const void* arguments) {
    if (state == kKernelStop && arguments) ++static_cast<Event*>(handle)->context->kernels_ended;
    return 0;
}

int finalize(void* pointer) {
    auto* context = static_cast<Context*>(pointer);
    const char* path = std::getenv("COUNTING_PROFILER_FILE");
    const int file = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
    if (file < 0) return 0;
    int all_started = 0;
    for (const auto& count : context->started) all_started += count;
    char line[640];
    const int length = std::snprintf(
        line, sizeof line,
        "{\"id\": \"%016lx\", \"name\": \"%s\", \"rank\": %d, \"ranks\": %d, \"interface\": %d, \"pid\": %d, \"groups\": %d, "
        "\"collectives\": %d, \"messages\": %d, \"kernels\": %d, \"kernels_ended\": %d, \"group_calls\": %d, "
        "\"collective_calls\": %d, \"message_calls\": %d, \"captured_calls\": %d, \"launches\": %d, \"orphans\": %d, "
        "\"unstopped\": %d}\n",
        static_cast<unsigned long>(context->id), context->name, context->rank, context->ranks, context->interface, getpid(),
        context->started[0].load(), context->started[1].load(), context->started[2].load(), context->started[6].load(),
        context->kernels_ended.load(), context->started[8].load(), context->started[9].load(), context->started[10].load(),
        context->captured_calls.load(), context->started[11].load(), context->orphans.load(),
        all_started - context->stopped.load());
    const bool is_written = write(file, line, static_cast<size_t>(length)) == length; // one call, so lines stay whole
    close(file);
    return is_written ? 0 : 1;
}

template <typename Init> struct Interface {
    const char* name;
    Init init;
    int (*start)(void*, void**, const Description*);
    int (*stop)(void*);
    int (*record)(void*, int, const void*);
    int (*finalize)(void*);
};

} // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))
EXPORTED const Interface<decltype(&init_v4)> ncclProfiler_v4{"counting", init_v4, start, stop, record, finalize};
EXPORTED const Interface<decltype(&init_v5)> ncclProfiler_v5{"counting", init_v5, start, stop, record, finalize};
EXPORTED const Interface<decltype(&init_v6)> ncclProfiler_v6{"counting", init_v6, start, stop, record, finalize};
