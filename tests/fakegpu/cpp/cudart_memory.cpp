// libcudart: allocation, copies and fills.
//
// As on a GPU, a copy to pageable host memory returns when it is done, and one from pageable memory reads its source before
// it returns.
#include "cudart.h"

#include <cstring>

using namespace fakegpu;

namespace {

struct PointerAttributes {
    int type;
    int device;
    void* device_pointer;
    void* host_pointer;
};

cudaError allocate_into(void** pointer, size_t size, MemoryKind kind) {
    *pointer = allocate(size, kind, current_device());
    return *pointer ? kSuccess : fail(kOutOfMemory);
}

void copy_rows(char* to, size_t to_pitch, const char* from, size_t from_pitch, size_t width, size_t height) {
    for (size_t row = 0; row < height; ++row) {
        std::memmove(to + row * to_pitch, from + row * from_pitch, width);
    }
}

void copy_async(void* to, const void* from, size_t size, Stream* stream) {
    if (is_capturing(stream)) { // a launch reads and writes host memory when it runs, pageable or not
        enqueue(stream, [to, from, size] { std::memmove(to, from, size); }, true);
        return;
    }
    const bool from_pageable = find_block(from).kind == MemoryKind::unregistered;
    const bool to_pageable = find_block(to).kind == MemoryKind::unregistered;
    if (from_pageable && !is_stream_idle(stream)) {
        auto staged = std::make_shared<std::string>(static_cast<const char*>(from), size);
        enqueue(stream, [to, staged] { std::memcpy(to, staged->data(), staged->size()); }, true);
    } else {
        enqueue(stream, [to, from, size] { std::memmove(to, from, size); }, true);
    }
    if (to_pageable) synchronize_stream(stream);
}

} // namespace

FAKEGPU_API cudaError cudaMalloc(void** pointer, size_t size) {
    const CaptureError error = check_unsafe_call();
    if (error != CaptureError::none) return fail_unless_none(error);
    return allocate_into(pointer, size, MemoryKind::device);
}
FAKEGPU_API cudaError cudaMallocAsync(void** pointer, size_t size, void*) {
    return allocate_into(pointer, size, MemoryKind::device);
}
FAKEGPU_API cudaError cudaMallocManaged(void** pointer, size_t size, unsigned) {
    return allocate_into(pointer, size, MemoryKind::managed);
}
FAKEGPU_API cudaError cudaHostAlloc(void** pointer, size_t size, unsigned) {
    return allocate_into(pointer, size, MemoryKind::host);
}
FAKEGPU_API cudaError cudaMallocHost(void** pointer, size_t size) { return cudaHostAlloc(pointer, size, 0); }
FAKEGPU_API cudaError cudaFree(void* pointer) {
    // As on a GPU, freeing waits for the device; 0 is the usual way to create a context.
    if (pointer) synchronize_device(current_device());
    return release(pointer) ? kSuccess : fail(kInvalidValue);
}
FAKEGPU_API cudaError cudaFreeAsync(void* pointer, void* stream) {
    enqueue(resolve_stream(stream), [pointer] { release(pointer); }, true);
    return kSuccess;
}
FAKEGPU_API cudaError cudaFreeHost(void* pointer) { return release(pointer) ? kSuccess : fail(kInvalidValue); }
FAKEGPU_API cudaError cudaHostRegister(void* pointer, size_t size, unsigned) {
    register_host(pointer, size);
    return kSuccess;
}
FAKEGPU_API cudaError cudaHostUnregister(void* pointer) {
    unregister_host(pointer);
    return kSuccess;
}
FAKEGPU_API cudaError cudaHostGetDevicePointer(void** device, void* host, unsigned) {
    *device = host;
    return kSuccess;
}
FAKEGPU_API cudaError cudaMemGetInfo(size_t* free, size_t* total) {
    *total = device_memory_bytes();
    *free = *total - allocated_bytes(current_device());
    return kSuccess;
}

FAKEGPU_API cudaError cudaPointerGetAttributes(PointerAttributes* attributes, const void* pointer) {
    const Block block = find_block(pointer);
    void* address = const_cast<void*>(pointer);
    attributes->type = static_cast<int>(block.kind);
    attributes->device = block.kind == MemoryKind::unregistered ? -2 : block.device;
    attributes->device_pointer = block.kind == MemoryKind::unregistered ? nullptr : address;
    attributes->host_pointer = block.kind == MemoryKind::device ? nullptr : address;
    return kSuccess;
}

FAKEGPU_API cudaError cudaMemcpyAsync(void* to, const void* from, size_t size, int, void* stream) {
    copy_async(to, from, size, resolve_stream(stream));
    return kSuccess;
}
FAKEGPU_API cudaError cudaMemcpy(void* to, const void* from, size_t size, int) {
    Stream* stream = resolve_stream(nullptr);
    copy_async(to, from, size, stream);
    synchronize_stream(stream);
    return kSuccess;
}
FAKEGPU_API cudaError cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, void* stream) {
    return cudaMemcpyAsync(to, from, size, 0, stream);
}
FAKEGPU_API cudaError cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                        size_t height, int, void* handle) {
    Stream* stream = resolve_stream(handle);
    auto* target = static_cast<char*>(to);
    const auto* source = static_cast<const char*>(from);
    enqueue(stream, [=] { copy_rows(target, to_pitch, source, from_pitch, width, height); }, true);
    const bool is_pageable = find_block(to).kind == MemoryKind::unregistered || find_block(from).kind == MemoryKind::unregistered;
    if (is_pageable && !is_capturing(stream)) synchronize_stream(stream);
    return kSuccess;
}
FAKEGPU_API cudaError cudaMemsetAsync(void* pointer, int value, size_t size, void* stream) {
    enqueue(resolve_stream(stream), [pointer, value, size] { std::memset(pointer, value, size); }, true);
    return kSuccess;
}
FAKEGPU_API cudaError cudaMemset(void* pointer, int value, size_t size) {
    return cudaMemsetAsync(pointer, value, size, nullptr);
}
// Kernels compute nothing, so their variables hold nothing.
FAKEGPU_API cudaError cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, int) { return kSuccess; }
FAKEGPU_API cudaError cudaGetSymbolAddress(void** pointer, const void*) {
    static void* area = allocate(1 << 20, MemoryKind::device, 0);
    *pointer = area;
    return kSuccess;
}

FAKEGPU_API cudaError cudaDeviceGetDefaultMemPool(void** pool, int) {
    static int placeholder;
    *pool = &placeholder;
    return kSuccess;
}
FAKEGPU_API cudaError cudaMemPoolGetAttribute(void*, int, void* value) {
    std::memset(value, 0, sizeof(uint64_t));
    return kSuccess;
}
