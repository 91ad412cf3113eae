// libnccl's functions: groups, collectives, sends and receives, custom reductions.
#include "nccl.h"

#include <cstring>
#include <map>

using namespace fakegpu;
using namespace fakegpu::nccl;

namespace {

constexpr int kFirstCustomOp = 5;

struct CustomOps {
    std::mutex mutex;
    std::map<int, double> scalars;
    int next = kFirstCustomOp;
};

CustomOps& custom_ops() {
    static auto* instance = new CustomOps;
    return *instance;
}

double scalar_of(int op) {
    if (op < kFirstCustomOp) return 1;
    std::lock_guard<std::mutex> lock(custom_ops().mutex);
    auto found = custom_ops().scalars.find(op);
    return found == custom_ops().scalars.end() ? 1 : found->second;
}

} // namespace

FAKEGPU_API int ncclGroupStart() {
    begin_group();
    return kSuccess;
}
FAKEGPU_API int ncclGroupEnd() { return end_group(); }

FAKEGPU_API int ncclAllReduce(const void* input, void* output, size_t count, int dtype, int op, void* communicator, void* stream) {
    return issue(communicator, resolve_stream(stream),
                 {Kind::all_reduce, input, output, count, dtype, op, 0, scalar_of(op)});
}
FAKEGPU_API int ncclAllGather(const void* input, void* output, size_t count, int dtype, void* communicator, void* stream) {
    return issue(communicator, resolve_stream(stream), {Kind::all_gather, input, output, count, dtype});
}
FAKEGPU_API int ncclReduceScatter(const void* input, void* output, size_t count, int dtype, int op, void* communicator,
                                  void* stream) {
    return issue(communicator, resolve_stream(stream),
                 {Kind::reduce_scatter, input, output, count, dtype, op, 0, scalar_of(op)});
}
FAKEGPU_API int ncclBroadcast(const void* input, void* output, size_t count, int dtype, int root, void* communicator,
                              void* stream) {
    return issue(communicator, resolve_stream(stream), {Kind::broadcast, input, output, count, dtype, 0, root});
}
FAKEGPU_API int ncclBcast(void* buffer, size_t count, int dtype, int root, void* communicator, void* stream) {
    return ncclBroadcast(buffer, buffer, count, dtype, root, communicator, stream);
}
FAKEGPU_API int ncclReduce(const void* input, void* output, size_t count, int dtype, int op, int root, void* communicator,
                           void* stream) {
    return issue(communicator, resolve_stream(stream),
                 {Kind::reduce, input, output, count, dtype, op, root, scalar_of(op)});
}
FAKEGPU_API int ncclAlltoAll(const void* input, void* output, size_t count, int dtype, void* communicator, void* stream) {
    return issue(communicator, resolve_stream(stream), {Kind::all_to_all, input, output, count, dtype});
}
FAKEGPU_API int ncclGather(const void* input, void* output, size_t count, int dtype, int root, void* communicator, void* stream) {
    return issue(communicator, resolve_stream(stream), {Kind::gather, input, output, count, dtype, 0, root});
}
FAKEGPU_API int ncclScatter(const void* input, void* output, size_t count, int dtype, int root, void* communicator,
                            void* stream) {
    return issue(communicator, resolve_stream(stream), {Kind::scatter, input, output, count, dtype, 0, root});
}
FAKEGPU_API int ncclSend(const void* input, size_t count, int dtype, int peer, void* communicator, void* stream) {
    return issue(communicator, resolve_stream(stream), {Kind::send, input, nullptr, count, dtype, 0, peer});
}
FAKEGPU_API int ncclRecv(void* output, size_t count, int dtype, int peer, void* communicator, void* stream) {
    return issue(communicator, resolve_stream(stream), {Kind::recv, nullptr, output, count, dtype, 0, peer});
}

// torch passes its scalar by a host pointer, except for tensors, which are read here all the same.
FAKEGPU_API int ncclRedOpCreatePreMulSum(int* op, void* scalar, int dtype, int, void*) {
    double value = 1;
    if (dtype == 7) value = *static_cast<float*>(scalar);
    if (dtype == 8) value = *static_cast<double*>(scalar);
    std::lock_guard<std::mutex> lock(custom_ops().mutex);
    *op = custom_ops().next++;
    custom_ops().scalars[*op] = value;
    return kSuccess;
}
// The operation may still be queued, so its scalar stays.
FAKEGPU_API int ncclRedOpDestroy(int, void*) { return kSuccess; }
