// Loads an NCCL profiler plugin and calls it. Written from the facts of NCCL's interface, without its headers.
#include "nccl_profiler.h"

#include <cstdlib>
#include <cstring>
#include <ctime>
#include <dlfcn.h>
#include <strings.h>

namespace fakegpu::nccl {

// The layout of versions 5 and 6. Version 4 has one byte of `type`, and the same offsets.
struct ProfilerEvent {
    uint64_t type = 0;
    void* parent = nullptr;
    int rank = 0;
    union {
        struct {
            bool is_captured;
            int depth;
        } group_call;
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
        struct {
            void* stream;
        } launch;
        struct {
            uint64_t sequence_number;
            const char* function;
            const void* input;
            void* output;
            size_t count;
            int root;
            const char* dtype;
            uint8_t channels;
            uint8_t warps;
            const char* algorithm;
            const char* protocol;
            void* group;
        } collective;
        struct {
            const char* function;
            void* buffer;
            const char* dtype;
            size_t count;
            int peer;
            uint8_t channels;
            void* group;
        } message;
        struct {
            uint8_t channel;
            uint64_t device_ns;
        } kernel;
        uint64_t all[16] = {};
    };
};

struct ProfilerPlugin {
    const char* name;
    void* init; // its arguments have another order in version 4
    int (*start)(void* context, void** handle, ProfilerEvent* event);
    int (*stop)(void* handle);
    int (*record)(void* handle, int state, void* arguments);
    int (*finalize)(void* context);
};

namespace {

// The kinds of events.
constexpr int kGroup = 1;
constexpr int kCollective = 2;
constexpr int kMessage = 4;
constexpr int kProxyOperation = 8;
constexpr int kProxyStep = 16;
constexpr int kKernel = 64;
constexpr int kNetwork = 128;
constexpr int kGroupCall = 256;
constexpr int kCollectiveCall = 512;
constexpr int kMessageCall = 1024;
constexpr int kLaunch = 2048;

// The bits by which each kind is wanted: its own, and those of its descendants.
constexpr int kWithinTask = kProxyOperation | kProxyStep | kKernel | kNetwork;
constexpr int kWantCollective = kCollective | kWithinTask;
constexpr int kWantMessage = kMessage | kWithinTask;
constexpr int kWantGroup = kGroup | kWantCollective | kWantMessage;
constexpr int kWantCollectiveCall = kCollectiveCall | kWantCollective;
constexpr int kWantMessageCall = kMessageCall | kWantMessage;
constexpr int kWantGroupCall = kGroupCall | kCollectiveCall | kMessageCall | kLaunch | kWantGroup;

// The states of events.
constexpr int kKernelStop = 22;
constexpr int kGroupBegun = 23;
constexpr int kGroupEnding = 24;

constexpr uint8_t kChannels = 2;
constexpr uint8_t kWarps = 16;
constexpr int kInt8 = 0;

int g_mask; // one for all communicators; the plugin may change it at any time

struct LoadedPlugin {
    std::mutex mutex;
    void* library = nullptr;
    const ProfilerPlugin* plugin = nullptr;
    int version = 0;
    int users = 0;
    bool has_failed = false; // then it is not tried again
};

LoadedPlugin& loaded() {
    static auto* instance = new LoadedPlugin;
    return *instance;
}

void* open_library() {
    const char* name = std::getenv("NCCL_PROFILER_PLUGIN");
    if (!name || !*name) return dlopen("libnccl-profiler.so", RTLD_NOW | RTLD_LOCAL);
    if (!strcasecmp(name, "none")) return nullptr;
    const std::string path = std::string(name).substr(0, 254);
    if (void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
    if (std::strchr(name, '/')) return nullptr;
    return dlopen(("libnccl-profiler-" + path + ".so").c_str(), RTLD_NOW | RTLD_LOCAL);
}

// The newest version of the interface that both know: each release of NCCL reads those before its own, too.
void find_plugin_locked(LoadedPlugin& state) {
    const int newest = FAKEGPU_NCCL_CODE >= 22900 ? 6 : FAKEGPU_NCCL_CODE >= 22800 ? 5 : 4;
    for (state.version = newest; state.version >= 4; --state.version) {
        const std::string symbol = "ncclProfiler_v" + std::to_string(state.version);
        state.plugin = static_cast<const ProfilerPlugin*>(dlsym(state.library, symbol.c_str()));
        if (state.plugin) return;
    }
}

bool load_plugin() {
    LoadedPlugin& state = loaded();
    std::lock_guard<std::mutex> lock(state.mutex);
    if (state.has_failed) return false;
    if (!state.plugin) {
        state.library = open_library();
        if (state.library) find_plugin_locked(state);
        if (!state.plugin) {
            state.has_failed = true;
            return false;
        }
    }
    ++state.users;
    return true;
}

// As NCCL does it: a plugin that gets events after its last communicator is gone crashes.
void unload_plugin() {
    LoadedPlugin& state = loaded();
    std::lock_guard<std::mutex> lock(state.mutex);
    if (--state.users) return;
    dlclose(state.library);
    state.library = nullptr;
    state.plugin = nullptr;
}

// Equal on all members, as their segment's name is.
uint64_t hash_name(const std::string& name) {
    uint64_t hash = 14695981039346656037u;
    for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
    return hash;
}

extern "C" void log_nothing(int, unsigned long, const char*, int, const char*, ...) {}

// The device's clock.
uint64_t device_ns() {
    timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    return static_cast<uint64_t>(time.tv_sec) * 1000000000u + static_cast<uint64_t>(time.tv_nsec);
}

const char* function_name(Kind kind) {
    switch (kind) {
    case Kind::all_reduce: return "AllReduce";
    case Kind::all_gather: return "AllGather";
    case Kind::reduce_scatter: return "ReduceScatter";
    case Kind::broadcast: return "Broadcast";
    case Kind::reduce: return "Reduce";
    case Kind::send: return "Send";
    case Kind::recv: return "Recv";
    default: return "Unknown"; // is split into sends and receives
    }
}

const char* dtype_name(int dtype) {
    static const char* names[] = {"ncclInt8",    "ncclUint8",   "ncclInt32",    "ncclUint32",     "ncclInt64",     "ncclUint64",
                                  "ncclFloat16", "ncclFloat32", "ncclFloat64", "ncclBfloat16", "ncclFloat8e4m3", "ncclFloat8e5m2"};
    return dtype >= 0 && dtype < 12 ? names[dtype] : "Unknown";
}

struct GroupCall {
    std::shared_ptr<Profiler> profiler; // of the communicator of the first call
    void* handle = nullptr;
};
thread_local GroupCall tls_group_call;

ProfiledTask make_task(Kind kind, const Operation& operation, size_t offset, int peer) {
    const void* input = kind == Kind::recv ? nullptr : static_cast<const char*>(operation.input) + offset;
    void* output = kind == Kind::send ? nullptr : static_cast<char*>(operation.output) + offset;
    return ProfiledTask{kind, input, output, operation.count, operation.dtype, peer};
}

// What NCCL makes of an operation. It copies the data itself where a communicator has one member, and drops what is empty.
std::vector<ProfiledTask> make_tasks(const Operation& operation, int rank, int size) {
    std::vector<ProfiledTask> tasks;
    if (!is_point_to_point(operation.kind) && (size == 1 || !operation.count)) return tasks;
    const size_t block = operation.count * element_size(operation.dtype);
    const int peers_of_root = rank == operation.root ? size : 0;
    switch (operation.kind) {
    case Kind::all_to_all:
        for (int peer = 0; peer < size; ++peer) {
            tasks.push_back(make_task(Kind::send, operation, block * peer, peer));
            tasks.push_back(make_task(Kind::recv, operation, block * peer, peer));
        }
        break;
    case Kind::gather:
        tasks.push_back(make_task(Kind::send, operation, 0, operation.root));
        for (int peer = 0; peer < peers_of_root; ++peer) {
            tasks.push_back(make_task(Kind::recv, operation, block * peer, peer));
        }
        break;
    case Kind::scatter:
        for (int peer = 0; peer < peers_of_root; ++peer) {
            tasks.push_back(make_task(Kind::send, operation, block * peer, peer));
        }
        tasks.push_back(make_task(Kind::recv, operation, 0, operation.root));
        break;
    default: tasks.push_back(make_task(operation.kind, operation, 0, operation.root));
    }
    return tasks;
}

int plan_mask(const Plan& plan) {
    for (const ProfiledTask* task : plan) {
        if (task->mask) return task->mask;
    }
    return 0;
}

} // namespace

std::shared_ptr<Profiler> Profiler::open(const Communicator& communicator) {
    if (!load_plugin()) return nullptr;
    auto profiler = std::make_shared<Profiler>(communicator.rank, communicator.size);
    profiler->plugin_ = loaded().plugin;
    profiler->version_ = loaded().version;
    const uint64_t id = hash_name(communicator.name);
    const char* label = communicator.label.empty() ? nullptr : communicator.label.c_str();
    const int nodes = 1;
    auto* log = reinterpret_cast<void*>(&log_nothing);
    int error;
    if (profiler->version_ == 4) {
        using Init = int (*)(void**, int*, const char*, uint64_t, int, int, int, void*);
        error = reinterpret_cast<Init>(profiler->plugin_->init)(&profiler->context_, &g_mask, label, id, nodes,
                                                                communicator.size, communicator.rank, log);
    } else {
        using Init = int (*)(void**, uint64_t, int*, const char*, int, int, int, void*);
        error = reinterpret_cast<Init>(profiler->plugin_->init)(&profiler->context_, id, &g_mask, label, nodes,
                                                                communicator.size, communicator.rank, log);
    }
    if (error) {
        unload_plugin();
        return nullptr;
    }
    profiler->is_open_ = true;
    return profiler;
}

void Profiler::close() {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    if (!is_open_) return;
    is_open_ = false;
    if (context_) plugin_->finalize(context_);
    unload_plugin();
}

void* Profiler::start(ProfilerEvent& event) {
    void* handle = nullptr;
    if (version_ == 4) { // has no events of the program's calls
        if (event.type > kNetwork) return nullptr;
        if (event.type == kCollective) event.parent = event.collective.group;
        if (event.type == kMessage) event.parent = event.message.group;
    }
    plugin_->start(context_, &handle, &event);
    return handle;
}

void Profiler::start_call(ProfiledTask& task, Stream* stream, bool is_captured) {
    if (!(task.mask & (is_point_to_point(task.kind) ? kWantMessageCall : kWantCollectiveCall))) return;
    ProfilerEvent event;
    event.parent = task.group_call;
    const char* function = function_name(task.kind);
    if (is_point_to_point(task.kind)) {
        event.type = kMessageCall;
        event.message_call = {function, task.count, dtype_name(task.dtype), stream, is_captured};
    } else {
        event.type = kCollectiveCall;
        event.collective_call = {function, task.count, dtype_name(task.dtype), task.root, stream, is_captured};
    }
    task.call = start(event);
    if (task.call) plugin_->stop(task.call);
}

std::vector<ProfiledTask> Profiler::report_call(const Operation& operation, Stream* stream, bool is_captured, int depth) {
    std::vector<ProfiledTask> tasks = make_tasks(operation, rank_, size_);
    std::shared_lock<std::shared_mutex> lock(mutex_);
    if (!is_open_) return {};
    GroupCall& group = tls_group_call;
    for (ProfiledTask& task : tasks) {
        task.mask = __atomic_load_n(&g_mask, __ATOMIC_RELAXED);
        if (!group.profiler && task.mask & kWantGroupCall) {
            ProfilerEvent event;
            event.type = kGroupCall;
            event.group_call = {is_captured, depth + 1}; // a call is a group, too
            group = {shared_from_this(), start(event)};
            if (group.handle) plugin_->record(group.handle, kGroupBegun, nullptr);
        }
        task.group_call = group.handle;
        start_call(task, stream, is_captured);
        if (task.kind == Kind::all_gather || task.kind == Kind::broadcast) { // NCCL moves bytes from here on
            task.count *= element_size(task.dtype);
            task.dtype = kInt8;
        }
    }
    return tasks;
}

void* Profiler::start_launch(const Plan& plan, Stream* stream) {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    if (!is_open_ || !(plan_mask(plan) & kLaunch)) return nullptr;
    ProfilerEvent event;
    event.type = kLaunch;
    event.parent = plan.front()->group_call;
    event.launch = {stream};
    return start(event);
}

void Profiler::report_enqueued(const Plan& plan, bool is_counted) {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    if (!is_open_) return;
    void* group = nullptr;
    if (plan_mask(plan) & kWantGroup) {
        ProfilerEvent event;
        event.type = kGroup;
        group = start(event);
    }
    for (ProfiledTask* task : plan) {
        const char* function = function_name(task->kind);
        const char* dtype = dtype_name(task->dtype);
        ProfilerEvent event;
        event.parent = task->call;
        event.rank = rank_;
        if (is_point_to_point(task->kind)) {
            void* buffer = task->output ? task->output : const_cast<void*>(task->input);
            event.type = kMessage;
            event.message = {function, buffer, dtype, task->count, task->root, kChannels, group};
            if (task->mask & kWantMessage) task->handle = start(event);
        } else {
            std::atomic<uint64_t>& sequence_number = sequence_numbers_[static_cast<int>(task->kind)];
            event.type = kCollective;
            event.collective = {sequence_number, function,  task->input, task->output, task->count, task->root,
                                dtype,           kChannels, kWarps,      "RING",       "SIMPLE",    group};
            if (task->mask & kWantCollective) task->handle = start(event);
            if (is_counted) ++sequence_number;
        }
    }
    for (ProfiledTask* task : plan) {
        if (task->handle) plugin_->stop(task->handle);
    }
    if (group) plugin_->stop(group);
}

void Profiler::report_started(ProfiledTask& task) {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    if (!is_open_ || !(task.mask & kKernel)) return;
    for (uint8_t channel = 0; channel < kChannels; ++channel) {
        ProfilerEvent event;
        event.type = kKernel;
        event.parent = task.handle;
        event.kernel = {channel, device_ns()};
        task.kernels.push_back(start(event));
    }
}

void Profiler::report_ended(ProfiledTask& task) {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    if (!is_open_) return;
    for (void* kernel : task.kernels) {
        if (!kernel) continue;
        uint64_t time = device_ns();
        plugin_->record(kernel, kKernelStop, &time);
        plugin_->stop(kernel);
    }
}

void Profiler::record_group_call(void* handle, int state) {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    if (is_open_ && handle) plugin_->record(handle, state, nullptr);
}

void Profiler::stop(void* handle) {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    if (is_open_ && handle) plugin_->stop(handle);
}

bool has_callback(const Plan& plan) { return plan_mask(plan) & kKernel; }

void report_group_end() {
    const GroupCall& group = tls_group_call;
    if (group.profiler) group.profiler->record_group_call(group.handle, kGroupEnding);
}

void report_group_done() {
    GroupCall& group = tls_group_call;
    if (group.profiler) group.profiler->stop(group.handle);
    group = {};
}

} // namespace fakegpu::nccl
