// Captures in progress, the rules that they impose on other calls, and launches of graphs.
#include "graphs.h"

#include <map>
#include <thread>

namespace fakegpu {

struct Capture {
    uint64_t id;
    Stream* origin;
    CaptureMode mode;
    std::thread::id thread;
    Graph* graph;
    bool is_graph_owned;
    size_t first_node; // of this capture: the graph may have had others before
    bool is_invalidated = false;
    bool has_ended = false;
    // The streams that take part, each with the nodes that its next one depends on.
    std::map<Stream*, std::set<Node*>> streams;
};

namespace {

struct CaptureRegistry {
    std::mutex mutex;
    std::vector<std::shared_ptr<Capture>> captures;
    uint64_t next_id = 1;
};

CaptureRegistry& registry() {
    static auto* instance = new CaptureRegistry;
    return *instance;
}

// Lets all work outside of captures pass without a lock.
std::atomic<int> g_captures{0};
thread_local CaptureMode tls_mode = CaptureMode::global;

std::shared_ptr<Capture> find_locked(Stream* stream) {
    for (const auto& capture : registry().captures) {
        if (capture->streams.count(stream)) return capture;
    }
    return nullptr;
}

bool is_all_joined(const Capture& capture) {
    std::set<Node*> reached;
    std::vector<Node*> open(capture.streams.at(capture.origin).begin(), capture.streams.at(capture.origin).end());
    while (!open.empty()) {
        Node* node = open.back();
        open.pop_back();
        if (!reached.insert(node).second) continue;
        open.insert(open.end(), node->dependencies.begin(), node->dependencies.end());
    }
    for (size_t i = capture.first_node; i < capture.graph->nodes.size(); ++i) {
        if (!reached.count(capture.graph->nodes[i].get())) return false;
    }
    return true;
}

// Whether the calling thread may make a call that could synchronize with what is being captured.
bool is_unsafe_beside(const Capture& capture) {
    if (tls_mode == CaptureMode::relaxed || capture.mode == CaptureMode::relaxed) return false;
    if (capture.thread == std::this_thread::get_id()) return true;
    return tls_mode == CaptureMode::global && capture.mode == CaptureMode::global;
}

template <typename Condition> CaptureError invalidate_if(Condition is_concerned) {
    if (!g_captures) return CaptureError::none;
    CaptureError result = CaptureError::none;
    std::lock_guard<std::mutex> lock(registry().mutex);
    for (const auto& capture : registry().captures) {
        if (!is_concerned(*capture)) continue;
        capture->is_invalidated = true;
        result = CaptureError::unsupported;
    }
    return result;
}

// The graph may be destroyed while the launch runs, so the task keeps what its nodes use.
Task prepare_graph(const Graph& graph) {
    std::vector<Task> tasks;
    for (const auto& node : graph.nodes) tasks.push_back(node->prepare());
    return [tasks, user_objects = graph.user_objects] {
        for (const Task& task : tasks) task();
    };
}

} // namespace

bool is_capturing(Stream* stream) {
    if (!g_captures) return false;
    std::lock_guard<std::mutex> lock(registry().mutex);
    return find_locked(stream) != nullptr;
}

void capture_node(Stream* stream, std::function<Task()> prepare, bool may_block) {
    std::lock_guard<std::mutex> lock(registry().mutex);
    const std::shared_ptr<Capture> capture = find_locked(stream);
    if (!capture || capture->is_invalidated) return;
    std::set<Node*>& dependencies = capture->streams[stream];
    auto node = std::make_shared<Node>();
    node->dependencies = dependencies;
    node->prepare = std::move(prepare);
    node->may_block = may_block;
    dependencies = {node.get()};
    capture->graph->nodes.push_back(std::move(node));
}

CaptureError begin_capture(Stream* stream, CaptureMode mode, Graph* graph, std::set<Node*> dependencies) {
    std::lock_guard<std::mutex> lock(registry().mutex);
    if (find_locked(stream)) return CaptureError::illegal_state;
    auto capture = std::make_shared<Capture>();
    capture->id = registry().next_id++;
    capture->origin = stream;
    capture->mode = mode;
    capture->thread = std::this_thread::get_id();
    capture->is_graph_owned = !graph;
    capture->graph = graph ? graph : new Graph;
    capture->first_node = capture->graph->nodes.size();
    capture->streams[stream] = std::move(dependencies);
    registry().captures.push_back(std::move(capture));
    ++g_captures;
    return CaptureError::none;
}

CaptureError end_capture(Stream* stream, Graph** graph) {
    *graph = nullptr;
    std::lock_guard<std::mutex> lock(registry().mutex);
    const std::shared_ptr<Capture> capture = find_locked(stream);
    if (!capture) return CaptureError::illegal_state;
    if (capture->origin != stream) return CaptureError::unmatched;
    if (capture->mode != CaptureMode::relaxed && capture->thread != std::this_thread::get_id()) {
        return CaptureError::wrong_thread;
    }
    CaptureError result = CaptureError::none;
    if (capture->is_invalidated) result = CaptureError::invalidated;
    else if (!is_all_joined(*capture)) result = CaptureError::unjoined;
    capture->has_ended = true;
    auto& captures = registry().captures;
    for (auto it = captures.begin(); it != captures.end(); ++it) {
        if (*it == capture) {
            captures.erase(it);
            break;
        }
    }
    --g_captures;
    if (result == CaptureError::none) *graph = capture->graph;
    else if (capture->is_graph_owned) delete capture->graph;
    return result;
}

CaptureInfo capture_info(Stream* stream) {
    CaptureInfo info;
    if (!g_captures) return info;
    std::lock_guard<std::mutex> lock(registry().mutex);
    const std::shared_ptr<Capture> capture = find_locked(stream);
    if (!capture) return info;
    info.status = capture->is_invalidated ? CaptureStatus::invalidated : CaptureStatus::active;
    info.id = capture->id;
    info.graph = capture->graph;
    const std::set<Node*>& nodes = capture->streams[stream];
    info.dependencies.assign(nodes.begin(), nodes.end());
    return info;
}

CaptureError change_dependencies(Stream* stream, const std::set<Node*>& nodes, bool is_replacing) {
    std::lock_guard<std::mutex> lock(registry().mutex);
    const std::shared_ptr<Capture> capture = find_locked(stream);
    if (!capture) return CaptureError::illegal_state;
    std::set<Node*>& dependencies = capture->streams[stream];
    if (is_replacing) dependencies.clear();
    dependencies.insert(nodes.begin(), nodes.end());
    return CaptureError::none;
}

void launch_graph(const Graph& graph, Stream* stream) {
    bool may_block = false;
    for (const auto& node : graph.nodes) may_block |= node->may_block;
    if (is_capturing(stream)) { // the graph becomes part of another one
        capture_node(stream, [graph] { return prepare_graph(graph); }, may_block);
        return;
    }
    count_launch(stream);
    enqueue(stream, prepare_graph(graph), !may_block);
    after_collective();
}

bool capture_event(Stream* stream, EventState& event) {
    if (!g_captures) return false;
    std::lock_guard<std::mutex> lock(registry().mutex);
    event.capture = find_locked(stream);
    if (!event.capture) return false;
    event.captured_after = event.capture->streams[stream];
    return true;
}

CaptureError join_capture(Stream* stream, const EventState& event) {
    std::lock_guard<std::mutex> lock(registry().mutex);
    const std::shared_ptr<Capture> own = find_locked(stream);
    if (!event.capture) {
        if (!own) return CaptureError::none;
        own->is_invalidated = true;
        return CaptureError::isolation;
    }
    if (event.capture->has_ended) {
        if (own) own->is_invalidated = true;
        return CaptureError::captured_event;
    }
    if (own && own != event.capture) {
        own->is_invalidated = event.capture->is_invalidated = true;
        return CaptureError::merge;
    }
    if (event.capture->is_invalidated) return CaptureError::invalidated;
    event.capture->streams[stream].insert(event.captured_after.begin(), event.captured_after.end());
    return CaptureError::none;
}

CaptureError check_unsafe_call() { return invalidate_if(is_unsafe_beside); }

CaptureError check_synchronization(Stream* stream) {
    return invalidate_if([stream](const Capture& capture) { return capture.streams.count(stream) > 0; });
}

CaptureError check_device_synchronization(int device) {
    return invalidate_if([device](const Capture& capture) {
        for (const auto& entry : capture.streams) {
            if (stream_device(entry.first) == device) return true;
        }
        return false;
    });
}

CaptureMode exchange_capture_mode(CaptureMode mode) {
    const CaptureMode earlier = tls_mode;
    tls_mode = mode;
    return earlier;
}

} // namespace fakegpu
