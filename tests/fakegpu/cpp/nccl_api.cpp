// libnccl's functions: communicators, errors, versions and memory.
#include "nccl_profiler.h"

#include <cstdio>
#include <cstring>
#include <random>
#include <unistd.h>

using namespace fakegpu;
using namespace fakegpu::nccl;

namespace {

struct UniqueId {
    char text[128];
};

using Handle = void*;

// The head of ncclConfig_t. The name is there from 2.27 on.
struct Configuration {
    size_t size;
    unsigned magic;
    unsigned version;
    int options[4];
    const char* network;
    int more_options[2];
    const char* name;
};
constexpr unsigned kConfigurationMagic = 0xcafebeef;

std::string label_of(const void* pointer, const std::string& fallback = "") {
    const auto* configuration = static_cast<const Configuration*>(pointer);
    if (!configuration) return fallback;
    const bool has_name = configuration->magic == kConfigurationMagic && configuration->size >= sizeof *configuration;
    return has_name && configuration->name ? configuration->name : "";
}

int join_into(Handle* handle, int size, const UniqueId& id, int rank, const void* configuration) {
    if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size) return kInvalidArgument;
    *handle = add_communicator(join(id.text, label_of(configuration), size, rank));
    return kSuccess;
}

void close_profiler(Communicator& communicator) {
    if (communicator.profiler) communicator.profiler->close();
}

void leave(Handle handle, uint32_t how) {
    CommunicatorPtr communicator = find_communicator(handle);
    if (!communicator) return;
    communicator->segment->rank(communicator->rank).gone = how;
    communicator->is_aborted = true;
    communicator->segment->notify();
    wake_waiters();
}

} // namespace

FAKEGPU_API int ncclGetVersion(int* version) {
    *version = FAKEGPU_NCCL_CODE;
    return kSuccess;
}

FAKEGPU_API int ncclGetUniqueId(UniqueId* id) {
    std::random_device random;
    std::memset(id, 0, sizeof *id);
    std::snprintf(id->text, sizeof id->text, "%d-%08x%08x", getpid(), random(), random());
    return kSuccess;
}

FAKEGPU_API int ncclCommInitRankConfig(Handle* handle, int size, UniqueId id, int rank, void* configuration) {
    return join_into(handle, size, id, rank, configuration);
}
FAKEGPU_API int ncclCommInitRank(Handle* handle, int size, UniqueId id, int rank) {
    return join_into(handle, size, id, rank, nullptr);
}
FAKEGPU_API int ncclCommInitRankScalable(Handle* handle, int size, int rank, int, UniqueId* ids,
                                         void* configuration) {
    return join_into(handle, size, ids[0], rank, configuration);
}
FAKEGPU_API int ncclCommSplit(Handle handle, int color, int key, Handle* created, void* configuration) {
    CommunicatorPtr parent = find_communicator(handle);
    if (!parent) return kInvalidArgument;
    CommunicatorPtr child = split(parent, label_of(configuration, parent->label), color, key);
    *created = child ? add_communicator(child) : nullptr;
    return kSuccess;
}
// The remaining members call it; no exchange is needed, as all give the same list.
FAKEGPU_API int ncclCommShrink(Handle handle, int* excluded, int count, Handle* created, void* configuration, int) {
    CommunicatorPtr parent = find_communicator(handle);
    if (!parent) return kInvalidArgument;
    int size = 0;
    int my_rank = 0;
    for (int rank = 0; rank < parent->size; ++rank) {
        bool is_excluded = false;
        for (int i = 0; i < count; ++i) is_excluded |= excluded[i] == rank;
        if (is_excluded) continue;
        if (rank == parent->rank) my_rank = size;
        ++size;
    }
    const std::string name = parent->name + ".shrunk" + std::to_string(++parent->children);
    *created = add_communicator(join(name, label_of(configuration, parent->label), size, my_rank));
    return kSuccess;
}
FAKEGPU_API int ncclCommInitAll(Handle* handles, int count, const int*) {
    // Several devices of one process would each need a thread to join.
    if (count != 1) return kInvalidUsage;
    UniqueId id;
    ncclGetUniqueId(&id);
    return join_into(handles, 1, id, 0, nullptr);
}

FAKEGPU_API int ncclCommAbort(Handle handle) {
    CommunicatorPtr communicator = find_communicator(handle);
    leave(handle, 2);
    if (communicator) close_profiler(*communicator);
    remove_communicator(handle);
    return kSuccess;
}
FAKEGPU_API int ncclCommFinalize(Handle) { return kSuccess; }
FAKEGPU_API int ncclCommDestroy(Handle handle) {
    CommunicatorPtr communicator = find_communicator(handle);
    if (communicator) {
        communicator->segment->rank(communicator->rank).gone = 1;
        close_profiler(*communicator);
    }
    remove_communicator(handle);
    return kSuccess;
}
FAKEGPU_API int ncclCommRevoke(Handle handle, int) {
    leave(handle, 2);
    return kSuccess;
}

FAKEGPU_API int ncclCommGetAsyncError(Handle handle, int* error) {
    *error = injected_async_error();
    CommunicatorPtr communicator = find_communicator(handle);
    if (communicator && reports_remote_error() && has_dead_peer(*communicator)) {
        communicator->is_vanished_peer = true;
        *error = kRemoteError;
    }
    return kSuccess;
}
FAKEGPU_API const char* ncclGetLastError(Handle handle) {
    CommunicatorPtr communicator = handle ? find_communicator(handle) : nullptr;
    return communicator && communicator->is_vanished_peer ? "stand-in NCCL: connection closed by remote peer" : "";
}
FAKEGPU_API const char* ncclGetErrorString(int code) {
    switch (code) {
    case 0: return "no error";
    case 1: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case 2: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case 3: return "internal error";
    case 4: return "invalid argument";
    case 5: return "invalid usage";
    case 6: return "remote process exited or there was a network error";
    case 7: return "NCCL operation in progress";
    default: return "unknown result code";
    }
}

FAKEGPU_API int ncclCommCount(Handle handle, int* count) {
    CommunicatorPtr communicator = find_communicator(handle);
    if (!communicator) return kInvalidArgument;
    *count = communicator->size;
    return kSuccess;
}
FAKEGPU_API int ncclCommUserRank(Handle handle, int* rank) {
    CommunicatorPtr communicator = find_communicator(handle);
    if (!communicator) return kInvalidArgument;
    *rank = communicator->rank;
    return kSuccess;
}
FAKEGPU_API int ncclCommCuDevice(Handle handle, int* device) {
    CommunicatorPtr communicator = find_communicator(handle);
    if (!communicator) return kInvalidArgument;
    *device = communicator->device;
    return kSuccess;
}

// Any registration succeeds; the data moves through shared memory all the same.
FAKEGPU_API int ncclCommRegister(Handle, void* buffer, size_t, void** registration) {
    *registration = buffer;
    return kSuccess;
}
FAKEGPU_API int ncclCommDeregister(Handle, void*) { return kSuccess; }
FAKEGPU_API int ncclCommWindowRegister(Handle, void* buffer, size_t, void** window, int) {
    *window = buffer;
    return kSuccess;
}
FAKEGPU_API int ncclMemAlloc(void** pointer, size_t size) {
    *pointer = allocate(size, MemoryKind::device, current_device());
    return *pointer ? kSuccess : 1;
}
FAKEGPU_API int ncclMemFree(void* pointer) {
    release(pointer);
    return kSuccess;
}
