// The few functions of the other vendor libraries whose result torch uses. Each library gets those that it is asked for.
#include "fakegpu.h"

using namespace fakegpu;

namespace {
int g_handle[64]; // torch wants a handle that is not null
}

#ifdef FAKEGPU_LIB_cublas
FAKEGPU_API int cublasCreate_v2(void** handle) {
    *handle = g_handle;
    return 0;
}
FAKEGPU_API int cublasGetVersion_v2(void*, int* version) {
    *version = FAKEGPU_CUDA_MAJOR * 10000;
    return 0;
}
FAKEGPU_API int cublasGetMathMode(void*, int* mode) {
    *mode = 0;
    return 0;
}
FAKEGPU_API int cublasGetPointerMode_v2(void*, int* mode) {
    *mode = 0;
    return 0;
}
#endif

#ifdef FAKEGPU_LIB_cublasLt
FAKEGPU_API int cublasLtCreate(void** handle) {
    *handle = g_handle;
    return 0;
}
FAKEGPU_API int cublasLtMatmulDescCreate(void** descriptor, int, int) {
    *descriptor = g_handle;
    return 0;
}
FAKEGPU_API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void*, int* count) {
    *count = 1;
    return 0;
}
#endif

#ifdef FAKEGPU_LIB_cusolver
FAKEGPU_API int cusolverDnCreate(void** handle) {
    *handle = g_handle;
    return 0;
}
#endif

#ifdef FAKEGPU_LIB_cusparse
FAKEGPU_API int cusparseCreate(void** handle) {
    *handle = g_handle;
    return 0;
}
#endif

#ifdef FAKEGPU_LIB_cudnn
FAKEGPU_API size_t cudnnGetVersion() { return 99900; } // torch wants its own major version and at least its minor
FAKEGPU_API size_t cudnnGetCudartVersion() { return FAKEGPU_CUDA_VERSION; }
FAKEGPU_API const char* cudnnGetErrorString(int) { return "cuDNN is not emulated"; }
FAKEGPU_API int cudnnCreate(void** handle) {
    *handle = g_handle;
    return 0;
}
#endif

#ifdef FAKEGPU_LIB_cupti
FAKEGPU_API int cuptiGetVersion(unsigned* version) {
    *version = 26;
    return 0;
}
#endif

#ifdef FAKEGPU_LIB_nvrtc
FAKEGPU_API int nvrtcVersion(int* major, int* minor) {
    *major = FAKEGPU_CUDA_MAJOR;
    *minor = 0;
    return 0;
}
FAKEGPU_API const char* nvrtcGetErrorString(int) { return "NVRTC is not emulated"; }
#endif

#ifdef FAKEGPU_LIB_cuda
FAKEGPU_API int cuInit(unsigned) { return 0; }
FAKEGPU_API int cuDriverGetVersion(int* version) {
    *version = FAKEGPU_CUDA_VERSION;
    return 0;
}
FAKEGPU_API int cuDeviceGetCount(int* count) {
    *count = device_count();
    return 0;
}
FAKEGPU_API int cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return 0;
}
// torch asks whether a device was used before it creates a context on it.
FAKEGPU_API int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* is_active) {
    *flags = 0;
    *is_active = is_device_used(device);
    return 0;
}
FAKEGPU_API int cuCtxGetCurrent(void** context) {
    *context = g_handle;
    return 0;
}
FAKEGPU_API int cuGetErrorString(int, const char** text) {
    *text = "driver error";
    return 0;
}
FAKEGPU_API int cuPointerGetAttribute(void* value, int, unsigned long long) {
    *static_cast<int*>(value) = 0;
    return 0;
}
#endif

#ifdef FAKEGPU_LIB_nvidia_ml
// torch asks for the processes on a device when memory has run out: there is none but the caller's own.
FAKEGPU_API int nvmlInit_v2() { return 0; }
FAKEGPU_API int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
    *device = g_handle;
    return 0;
}
FAKEGPU_API int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
    *count = 0;
    return 0;
}
FAKEGPU_API int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return 3; } // not supported
FAKEGPU_API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return 3; }
FAKEGPU_API int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return 3; }
FAKEGPU_API int nvmlSystemGetCudaDriverVersion_v2(int* version) {
    *version = FAKEGPU_CUDA_VERSION;
    return 0;
}
#endif
