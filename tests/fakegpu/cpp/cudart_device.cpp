// libcudart: devices, their properties, versions and errors.
#include "cudart.h"

#include <cstdio>
#include <cstring>
#include <dlfcn.h>

using namespace fakegpu;

namespace {

thread_local cudaError tls_last_error = kSuccess;

constexpr size_t kSharedPerBlock = 49152;
constexpr size_t kSharedPerSm = 167936;
constexpr size_t kSharedOptin = 166912;
constexpr int kSms = 108;
constexpr int kThreadsPerSm = 2048;
constexpr int kRegisters = 65536;
constexpr int kL2Bytes = 40 << 20;
// 8.0: with 9.0, torch sends bf16 attention to cuDNN.
constexpr int kMajor = 8;
constexpr int kMinor = 0;

// The device's properties as the runtime of each major version lays them out. The offsets follow from the documented
// order of the fields; torch.cuda.get_device_properties shows whether they are right.
struct PropertiesHead {
    char name[256];
    char uuid[16];
    char luid[8];
    unsigned luid_node_mask;
    size_t total_memory;
    size_t shared_per_block;
    int registers_per_block;
    int warp_size;
    size_t memory_pitch;
    int max_threads_per_block;
    int max_threads_dim[3];
    int max_grid_size[3];
#if FAKEGPU_CUDA_MAJOR < 13
    int clock_rate;
#endif
    size_t constant_memory;
    int major;
    int minor;
    size_t texture_alignment;
    size_t texture_pitch_alignment;
#if FAKEGPU_CUDA_MAJOR < 13
    int device_overlap;
#endif
    int multiprocessors;
#if FAKEGPU_CUDA_MAJOR < 13
    int kernel_timeout;
#endif
    int integrated;
    int can_map_host_memory;
#if FAKEGPU_CUDA_MAJOR < 13
    int compute_mode;
    int texture_1d_linear;
#endif
    int textures[39]; // the maximum extents of textures and surfaces
    size_t surface_alignment;
    int concurrent_kernels;
    int ecc_enabled;
    int pci_bus;
    int pci_device;
    int pci_domain;
    int tcc_driver;
    int async_engines;
    int unified_addressing;
#if FAKEGPU_CUDA_MAJOR < 13
    int memory_clock_rate;
#endif
    int memory_bus_width;
    int l2_bytes;
    int persisting_l2_bytes;
    int threads_per_multiprocessor;
    int stream_priorities;
    int global_l1;
    int local_l1;
    size_t shared_per_multiprocessor;
    int registers_per_multiprocessor;
    int managed_memory;
    int multi_gpu_board;
    int multi_gpu_board_group;
    int host_native_atomics;
#if FAKEGPU_CUDA_MAJOR < 13
    int single_to_double;
#endif
    int pageable_access;
    int concurrent_managed;
    int compute_preemption;
    int host_pointer_for_registered;
    int cooperative_launch;
#if FAKEGPU_CUDA_MAJOR < 13
    int cooperative_multi_device;
#endif
    size_t shared_per_block_optin;
};

int attribute_value(int attribute, int device) {
    switch (attribute) {
    case 1: return 1024;
    case 2: case 3: return 1024;
    case 4: return 64;
    case 5: return 2147483647;
    case 6: case 7: return 65535;
    case 8: return kSharedPerBlock;
    case 10: return 32;
    case 12: return kRegisters;
    case 16: return kSms;
    case 33: return device + 1;
    case 38: return kL2Bytes;
    case 39: return kThreadsPerSm;
    case 40: return 3;
    case 41: return 1;
    case 75: return kMajor;
    case 76: return kMinor;
    case 81: return kSharedPerSm;
    case 82: return kRegisters;
    case 97: return kSharedOptin;
    case 106: return 32;
    default: return 0;
    }
}

extern "C" int return_zero() { return 0; }

} // namespace

cudaError fail(cudaError code) {
    tls_last_error = code;
    return code;
}
cudaError fail_unless_none(CaptureError error) {
    return error == CaptureError::none ? kSuccess : fail(static_cast<cudaError>(error));
}

FAKEGPU_API cudaError cudaGetLastError() {
    const cudaError code = tls_last_error;
    tls_last_error = kSuccess;
    return code;
}
FAKEGPU_API cudaError cudaPeekAtLastError() { return tls_last_error; }

FAKEGPU_API const char* cudaGetErrorName(cudaError code) {
    switch (code) {
    case kSuccess: return "cudaSuccess";
    case kInvalidValue: return "cudaErrorInvalidValue";
    case kOutOfMemory: return "cudaErrorMemoryAllocation";
    case kNoDevice: return "cudaErrorNoDevice";
    case kInvalidDevice: return "cudaErrorInvalidDevice";
    case kNotReady: return "cudaErrorNotReady";
    case kNotSupported: return "cudaErrorNotSupported";
    case 401: return "cudaErrorIllegalState";
    case 900: return "cudaErrorStreamCaptureUnsupported";
    case 901: return "cudaErrorStreamCaptureInvalidated";
    case 902: return "cudaErrorStreamCaptureMerge";
    case 903: return "cudaErrorStreamCaptureUnmatched";
    case 904: return "cudaErrorStreamCaptureUnjoined";
    case 905: return "cudaErrorStreamCaptureIsolation";
    case 907: return "cudaErrorCapturedEvent";
    case 908: return "cudaErrorStreamCaptureWrongThread";
    default: return "cudaErrorUnknown";
    }
}
FAKEGPU_API const char* cudaGetErrorString(cudaError code) {
    switch (code) {
    case kOutOfMemory: return "out of memory";
    case 401: return "the operation cannot be performed in the present state";
    case 900: return "operation not permitted when stream is capturing";
    case 901: return "operation failed due to a previous error during capture";
    case 902: return "operation would result in a merge of separate capture sequences";
    case 903: return "capture was not ended in the same stream as it began";
    case 904: return "capturing stream has unjoined work";
    case 905: return "dependency created on uncaptured work in another stream";
    case 907: return "operation not permitted on an event last recorded in a capturing stream";
    case 908: return "attempt to terminate a thread-local capture sequence from another thread";
    default: return cudaGetErrorName(code);
    }
}

FAKEGPU_API cudaError cudaGetDeviceCount(int* count) {
    *count = device_count();
    return *count ? kSuccess : fail(kNoDevice);
}
FAKEGPU_API cudaError cudaGetDevice(int* device) {
    *device = current_device();
    return kSuccess;
}
FAKEGPU_API cudaError cudaSetDevice(int device) {
    if (device < 0 || device >= device_count()) return fail(kInvalidDevice);
    set_current_device(device);
    return kSuccess;
}

FAKEGPU_API cudaError cudaGetDeviceProperties(void* destination, int device) {
    if (device < 0 || device >= device_count()) return fail(kInvalidDevice);
    PropertiesHead p{};
    std::snprintf(p.name, sizeof p.name, "hangwatch stand-in GPU");
    p.uuid[0] = static_cast<char>(device + 1);
    p.total_memory = device_memory_bytes();
    p.shared_per_block = kSharedPerBlock;
    p.registers_per_block = kRegisters;
    p.warp_size = 32;
    p.memory_pitch = 2147483647;
    p.max_threads_per_block = 1024;
    p.max_threads_dim[0] = p.max_threads_dim[1] = 1024;
    p.max_threads_dim[2] = 64;
    p.max_grid_size[0] = 2147483647;
    p.max_grid_size[1] = p.max_grid_size[2] = 65535;
    p.constant_memory = 65536;
    p.major = kMajor;
    p.minor = kMinor;
    p.texture_alignment = 512;
    p.texture_pitch_alignment = 32;
    p.multiprocessors = kSms;
    p.can_map_host_memory = 1;
    p.concurrent_kernels = 1;
    p.pci_bus = device + 1;
    p.async_engines = 3;
    p.unified_addressing = 1;
    p.memory_bus_width = 5120;
    p.l2_bytes = kL2Bytes;
    p.threads_per_multiprocessor = kThreadsPerSm;
    p.stream_priorities = 1;
    p.global_l1 = p.local_l1 = 1;
    p.shared_per_multiprocessor = kSharedPerSm;
    p.registers_per_multiprocessor = kRegisters;
    p.cooperative_launch = 1;
    p.shared_per_block_optin = kSharedOptin;
    std::memcpy(destination, &p, sizeof p);
    return kSuccess;
}
FAKEGPU_API cudaError cudaGetDeviceProperties_v2(void* destination, int device) {
    return cudaGetDeviceProperties(destination, device);
}
FAKEGPU_API cudaError cudaDeviceGetAttribute(int* value, int attribute, int device) {
    *value = attribute_value(attribute, device);
    return kSuccess;
}
FAKEGPU_API cudaError cudaDeviceGetPCIBusId(char* text, int length, int device) {
    std::snprintf(text, static_cast<size_t>(length), "0000:%02x:00.0", device + 1);
    return kSuccess;
}
FAKEGPU_API cudaError cudaDeviceCanAccessPeer(int* can, int device, int peer) {
    *can = device != peer;
    return kSuccess;
}
FAKEGPU_API cudaError cudaDeviceEnablePeerAccess(int, unsigned) { return kSuccess; }
FAKEGPU_API cudaError cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return kSuccess;
}

FAKEGPU_API cudaError cudaDriverGetVersion(int* version) {
    *version = FAKEGPU_CUDA_VERSION;
    return kSuccess;
}
FAKEGPU_API cudaError cudaRuntimeGetVersion(int* version) {
    *version = FAKEGPU_CUDA_VERSION;
    return kSuccess;
}

// A driver function of our own, or one that does nothing and succeeds.
FAKEGPU_API cudaError cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                                       int* status) {
    static void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    void* found = driver ? dlsym(driver, symbol) : nullptr;
    *function = found ? found : reinterpret_cast<void*>(&return_zero);
    if (status) *status = 0;
    return kSuccess;
}
FAKEGPU_API cudaError cudaGetDriverEntryPoint(const char* symbol, void** function, unsigned long long flags, int* status) {
    return cudaGetDriverEntryPointByVersion(symbol, function, 0, flags, status);
}
