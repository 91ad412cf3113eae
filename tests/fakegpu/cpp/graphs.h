// Graphs: what is put into a capturing stream becomes a node of a graph. A launch runs all nodes on one stream, in the
// order of their capture.
#pragma once

#include "fakegpu.h"

#include <vector>

namespace fakegpu {

// The values are the runtime's error codes.
enum class CaptureError : int {
    none = 0,
    illegal_state = 401, // the stream does not capture, or does already
    unsupported = 900,   // the call is not allowed during a capture
    invalidated = 901,   // an earlier error has ended the capture
    merge = 902,         // the event belongs to another capture
    unmatched = 903,     // the capture did not begin on this stream
    unjoined = 904,      // another stream's work was not waited for
    isolation = 905,     // the event was recorded outside of the capture
    captured_event = 907,
    wrong_thread = 908,
};
enum class CaptureMode : int { global = 0, thread_local_only = 1, relaxed = 2 };
enum class CaptureStatus : int { none = 0, active = 1, invalidated = 2 };

struct Node {
    std::set<Node*> dependencies;
    std::function<Task()> prepare;
    bool may_block = false;
};

// Nodes are shared with what was instantiated from the graph, which may outlive it.
struct Graph {
    std::vector<std::shared_ptr<Node>> nodes; // in an order that respects their dependencies: that of their capture
    std::vector<std::shared_ptr<void>> user_objects;
};

struct CaptureInfo {
    CaptureStatus status = CaptureStatus::none;
    uint64_t id = 0;
    Graph* graph = nullptr;
    std::vector<Node*> dependencies; // of the next node on the stream
};

// Captures into `graph` if it is given, otherwise into a new one, which the caller gets in the end and owns.
CaptureError begin_capture(Stream* stream, CaptureMode mode, Graph* graph = nullptr, std::set<Node*> dependencies = {});
CaptureError end_capture(Stream* stream, Graph** graph);
CaptureInfo capture_info(Stream* stream);
CaptureError change_dependencies(Stream* stream, const std::set<Node*>& nodes, bool is_replacing);
void launch_graph(const Graph& graph, Stream* stream);

// False: the stream does not capture, so the event is to be recorded as usual.
bool capture_event(Stream* stream, EventState& event);
// Lets the stream wait for an event where one of them is part of a capture; this may make the stream part of it.
CaptureError join_capture(Stream* stream, const EventState& event);

// Each returns an error, and invalidates the captures concerned, if the call is not allowed because of a capture.
CaptureError check_unsafe_call(); // one that may synchronize, in any thread: see exchange_capture_mode
CaptureError check_synchronization(Stream* stream);
CaptureError check_device_synchronization(int device);
CaptureMode exchange_capture_mode(CaptureMode mode); // the calling thread's

} // namespace fakegpu
