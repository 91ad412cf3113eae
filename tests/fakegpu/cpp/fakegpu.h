// What the stand-in libraries share: streams, events, memory and planted faults of one process.
//
// libcuda-standin.so implements this header; the stand-ins for libcudart, libnccl and libcuda are thin layers over it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#define FAKEGPU_API extern "C" __attribute__((visibility("default")))

namespace fakegpu {

// --- devices ---
int device_count();
int current_device();
void set_current_device(int device);
int last_device(); // set by any thread of the program
bool is_device_used(int device);
size_t device_memory_bytes();

// --- streams: each is a FIFO that one thread executes ---
using Task = std::function<void()>;
struct Capture;
struct Node;
struct EventState {
    std::atomic<bool> is_done{false};
    double completed_at_ms = 0;
    // Of an event that was recorded on a capturing stream: it orders nodes of the graph and is never done.
    std::shared_ptr<Capture> capture;
    std::set<Node*> captured_after;
};
using EventStatePtr = std::shared_ptr<EventState>;

class Stream;
Stream* resolve_stream(void* handle);        // 0, 1 and 2 are the current device's default stream
Stream* create_stream(int device, int priority);
void destroy_stream(Stream* stream);
int stream_priority(Stream* stream);
int stream_device(Stream* stream);
bool is_stream_idle(Stream* stream);
void synchronize_stream(Stream* stream);
void synchronize_device(int device);

// Appends a task. `inline_ok` tasks never block and run in the caller when the stream is idle. All work goes through these
// three, so that a capturing stream puts it into its graph instead (graphs.h).
void enqueue(Stream* stream, Task task, bool inline_ok);
EventStatePtr record_event(Stream* stream);
void wait_event(Stream* stream, EventStatePtr event);
void complete_event(EventState& event);
void synchronize_event(const EventStatePtr& event);

// Whether the stream takes part in a capture. `prepare` is called in the host's thread at each launch of the graph, and
// returns what the device then does.
bool is_capturing(Stream* stream);
void capture_node(Stream* stream, std::function<Task()> prepare, bool may_block);

// Blocks the calling stream thread until `is_released()`; wakes about every 20 ms and on `wake_waiters`.
void block_until(const std::function<bool()>& is_released);
void wake_waiters();
double now_ms();

// --- memory ---
enum class MemoryKind { unregistered = 0, host = 1, device = 2, managed = 3 };
struct Block {
    uintptr_t begin = 0;
    size_t size = 0;
    MemoryKind kind = MemoryKind::unregistered;
    int device = 0;
};
void* allocate(size_t size, MemoryKind kind, int device); // null: out of memory
bool release(void* pointer);
void register_host(void* pointer, size_t size);
void unregister_host(void* pointer);
Block find_block(const void* pointer);
size_t allocated_bytes(int device);

// --- kernels: a few simple ones are computed, all others do nothing ---
using HostFunction = const void*;
void register_kernel(HostFunction function, const char* mangled_name);
const char* kernel_name(HostFunction function);
Task make_kernel(HostFunction function, void** arguments); // empty: does nothing
void launch(Stream* stream, HostFunction function, void** arguments);

// --- planted faults (faults.cpp has the list) ---
struct CollectivePlan {
    bool is_stalled = false; // never completes
    double delay_ms = 0;
    Task kernel_before; // of a graph: what its device runs first
};
void count_launch(Stream* stream);                 // may plant an endless kernel first
CollectivePlan plan_collective(bool is_replay); // counts one collective or group; may kill this process
void after_collective();                           // plants what follows the collective just issued
bool is_stall_released(uint64_t generation);
bool spins_in_synchronize(); // a host that waits uses the CPU, as with the vendor's driver
uint64_t stall_generation();
int injected_async_error();
bool reports_remote_error();
bool is_garbage_on_mismatch();
bool is_allocation_refused(size_t size, int device);
int process_rank();
void launch_blocked(Stream* stream, double milliseconds); // negative: until released

} // namespace fakegpu
