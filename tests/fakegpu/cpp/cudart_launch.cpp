// libcudart: registration and launch of kernels.
#include "cudart.h"

#include <cstring>
#include <vector>

using namespace fakegpu;

namespace {

struct Dim3 {
    unsigned x, y, z;
};

struct LaunchConfiguration {
    Dim3 grid;
    Dim3 block;
    size_t shared_bytes;
    void* stream;
};

// The head of cudaFuncAttributes.
struct FunctionAttributes {
    size_t shared_bytes;
    size_t constant_bytes;
    size_t local_bytes;
    int max_threads;
    int registers;
    int ptx_version;
    int binary_version;
};

thread_local std::vector<LaunchConfiguration> tls_configurations;
int g_fat_binary; // only its address is used

} // namespace

FAKEGPU_API void** __cudaRegisterFatBinary(void*) { return reinterpret_cast<void**>(&g_fat_binary); }
FAKEGPU_API void __cudaRegisterFatBinaryEnd(void**) {}
FAKEGPU_API void __cudaUnregisterFatBinary(void**) {}
FAKEGPU_API char __cudaInitModule(void**) { return 0; }
FAKEGPU_API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
FAKEGPU_API void __cudaRegisterFunction(void**, const char* host_function, char*, const char* device_name, int, void*, void*,
                                        void*, void*, int*) {
    register_kernel(host_function, device_name);
}

FAKEGPU_API unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared_bytes, void* stream) {
    tls_configurations.push_back(LaunchConfiguration{grid, block, shared_bytes, stream});
    return 0;
}
FAKEGPU_API cudaError __cudaPopCallConfiguration(Dim3* grid, Dim3* block, size_t* shared_bytes, void** stream) {
    const LaunchConfiguration configuration = tls_configurations.back();
    tls_configurations.pop_back();
    *grid = configuration.grid;
    *block = configuration.block;
    *shared_bytes = configuration.shared_bytes;
    *stream = configuration.stream;
    return kSuccess;
}

FAKEGPU_API cudaError cudaLaunchKernel(const void* function, Dim3, Dim3, void** arguments, size_t, void* stream) {
    launch(resolve_stream(stream), function, arguments);
    return kSuccess;
}
FAKEGPU_API cudaError cudaLaunchCooperativeKernel(const void* function, Dim3 grid, Dim3 block, void** arguments, size_t shared,
                                                  void* stream) {
    return cudaLaunchKernel(function, grid, block, arguments, shared, stream);
}
FAKEGPU_API cudaError cudaLaunchKernelExC(const LaunchConfiguration* configuration, const void* function, void** arguments) {
    launch(resolve_stream(configuration->stream), function, arguments);
    return kSuccess;
}
// CUDA 13 launches through a kernel's handle: ours is the host function itself.
FAKEGPU_API cudaError __cudaGetKernel(const void** kernel, const void* host_function) {
    *kernel = host_function;
    return kSuccess;
}
FAKEGPU_API cudaError __cudaLaunchKernel(const void* kernel, Dim3 grid, Dim3 block, void** arguments, size_t shared,
                                         void* stream) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

FAKEGPU_API cudaError cudaFuncGetAttributes(FunctionAttributes* attributes, const void*) {
    *attributes = FunctionAttributes{0, 0, 0, 1024, 32, 80, 80};
    return kSuccess;
}
FAKEGPU_API cudaError cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
    *blocks = 8;
    return kSuccess;
}
FAKEGPU_API cudaError cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* function, int threads,
                                                                             size_t shared, unsigned) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}
