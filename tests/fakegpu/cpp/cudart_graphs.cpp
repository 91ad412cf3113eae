// libcudart: capture of graphs, their instantiation and their launch.
//
// A graph's handle is a Graph, and so is that of what is instantiated from it.
#include "cudart.h"

#include <algorithm>
#include <vector>

using namespace fakegpu;

namespace {

constexpr unsigned kSetDependencies = 1;

// What a graph keeps until it is gone, such as the arguments of a callback.
struct UserObject {
    std::shared_ptr<void> object;
    unsigned references;
};

cudaError copy_nodes(const std::vector<Node*>& found, Node** nodes, size_t* count) {
    if (nodes) std::copy_n(found.begin(), std::min(*count, found.size()), nodes);
    *count = found.size();
    return kSuccess;
}

cudaError get_capture_info(void* handle, int* status, unsigned long long* id, Graph** graph, Node*** dependencies,
                           size_t* count) {
    thread_local std::vector<Node*> tls_dependencies; // valid until the thread's next call, as the runtime's
    CaptureInfo info = capture_info(resolve_stream(handle));
    *status = static_cast<int>(info.status);
    if (info.status == CaptureStatus::none) return kSuccess;
    tls_dependencies = std::move(info.dependencies);
    if (id) *id = info.id;
    if (graph) *graph = info.graph;
    if (dependencies) *dependencies = tls_dependencies.data();
    if (count) *count = tls_dependencies.size();
    return kSuccess;
}

cudaError begin(void* handle, int mode, Graph* graph, std::set<Node*> dependencies) {
    // The default stream cannot be captured.
    if (reinterpret_cast<uintptr_t>(handle) <= 2) return fail_unless_none(CaptureError::unsupported);
    const auto chosen = static_cast<CaptureMode>(mode);
    return fail_unless_none(begin_capture(resolve_stream(handle), chosen, graph, std::move(dependencies)));
}

cudaError change(void* stream, Node** nodes, size_t count, unsigned flags) {
    const std::set<Node*> chosen(nodes, nodes + count);
    return fail_unless_none(change_dependencies(resolve_stream(stream), chosen, flags & kSetDependencies));
}

} // namespace

FAKEGPU_API cudaError cudaStreamIsCapturing(void* stream, int* status) {
    return get_capture_info(stream, status, nullptr, nullptr, nullptr, nullptr);
}
FAKEGPU_API cudaError cudaStreamGetCaptureInfo_v2(void* stream, int* status, unsigned long long* id, Graph** graph,
                                                  Node*** dependencies, size_t* count) {
    return get_capture_info(stream, status, id, graph, dependencies, count);
}
FAKEGPU_API cudaError cudaStreamGetCaptureInfo_v3(void* stream, int* status, unsigned long long* id, Graph** graph,
                                                  Node*** dependencies, const void** edges, size_t* count) {
    if (edges) *edges = nullptr; // all are plain ones
    return get_capture_info(stream, status, id, graph, dependencies, count);
}
#if FAKEGPU_CUDA_MAJOR < 13
FAKEGPU_API cudaError cudaStreamGetCaptureInfo(void* stream, int* status, unsigned long long* id) {
    return get_capture_info(stream, status, id, nullptr, nullptr, nullptr);
}
FAKEGPU_API cudaError cudaStreamUpdateCaptureDependencies(void* stream, Node** nodes, size_t count, unsigned flags) {
    return change(stream, nodes, count, flags);
}
FAKEGPU_API cudaError cudaStreamUpdateCaptureDependencies_v2(void* stream, Node** nodes, const void*, size_t count,
                                                             unsigned flags) {
    return change(stream, nodes, count, flags);
}
FAKEGPU_API cudaError cudaGraphNodeGetDependencies(Node* node, Node** dependencies, size_t* count) {
    return copy_nodes({node->dependencies.begin(), node->dependencies.end()}, dependencies, count);
}
#else
FAKEGPU_API cudaError cudaStreamGetCaptureInfo(void* stream, int* status, unsigned long long* id, Graph** graph,
                                               Node*** dependencies, const void** edges, size_t* count) {
    return cudaStreamGetCaptureInfo_v3(stream, status, id, graph, dependencies, edges, count);
}
FAKEGPU_API cudaError cudaStreamUpdateCaptureDependencies(void* stream, Node** nodes, const void*, size_t count,
                                                          unsigned flags) {
    return change(stream, nodes, count, flags);
}
FAKEGPU_API cudaError cudaGraphNodeGetDependencies(Node* node, Node** dependencies, void*, size_t* count) {
    return copy_nodes({node->dependencies.begin(), node->dependencies.end()}, dependencies, count);
}
#endif

FAKEGPU_API cudaError cudaStreamBeginCapture(void* stream, int mode) { return begin(stream, mode, nullptr, {}); }
FAKEGPU_API cudaError cudaStreamBeginCaptureToGraph(void* stream, Graph* graph, Node** nodes, const void*, size_t count,
                                                    int mode) {
    return begin(stream, mode, graph, {nodes, nodes + count});
}
FAKEGPU_API cudaError cudaStreamEndCapture(void* stream, Graph** graph) {
    return fail_unless_none(end_capture(resolve_stream(stream), graph));
}
FAKEGPU_API cudaError cudaThreadExchangeStreamCaptureMode(int* mode) {
    *mode = static_cast<int>(exchange_capture_mode(static_cast<CaptureMode>(*mode)));
    return kSuccess;
}

FAKEGPU_API cudaError cudaGraphCreate(Graph** graph, unsigned) {
    *graph = new Graph;
    return kSuccess;
}
FAKEGPU_API cudaError cudaGraphDestroy(Graph* graph) {
    delete graph;
    return kSuccess;
}
FAKEGPU_API cudaError cudaGraphGetNodes(Graph* graph, Node** nodes, size_t* count) {
    std::vector<Node*> all;
    for (const auto& node : graph->nodes) all.push_back(node.get());
    return copy_nodes(all, nodes, count);
}
FAKEGPU_API cudaError cudaGraphInstantiateWithFlags(Graph** executable, const Graph* graph, unsigned long long) {
    *executable = new Graph(*graph);
    return kSuccess;
}
FAKEGPU_API cudaError cudaGraphInstantiate(Graph** executable, const Graph* graph, unsigned long long flags) {
    return cudaGraphInstantiateWithFlags(executable, graph, flags);
}
FAKEGPU_API cudaError cudaGraphExecDestroy(Graph* executable) {
    delete executable;
    return kSuccess;
}
FAKEGPU_API cudaError cudaGraphLaunch(Graph* executable, void* stream) {
    launch_graph(*executable, resolve_stream(stream));
    return kSuccess;
}
// Conditional nodes are not emulated.
FAKEGPU_API cudaError cudaGraphConditionalHandleCreate(void*, Graph*, unsigned, unsigned) { return fail(kNotSupported); }
FAKEGPU_API cudaError cudaGraphAddNode() { return fail(kNotSupported); }

FAKEGPU_API cudaError cudaUserObjectCreate(UserObject** created, void* pointer, void (*destroy)(void*), unsigned references,
                                           unsigned) {
    *created = new UserObject{std::shared_ptr<void>(pointer, destroy), references};
    return kSuccess;
}
FAKEGPU_API cudaError cudaUserObjectRelease(UserObject* object, unsigned count) {
    object->references -= std::min(count, object->references);
    if (!object->references) delete object;
    return kSuccess;
}
FAKEGPU_API cudaError cudaGraphRetainUserObject(Graph* graph, UserObject* object, unsigned count, unsigned flags) {
    constexpr unsigned kMove = 1; // the caller's references become the graph's
    graph->user_objects.push_back(object->object);
    return flags & kMove ? cudaUserObjectRelease(object, count) : kSuccess;
}
