// Reports a communicator's work to an NCCL profiler plugin, in the order and the layout of NCCL 2.27 to 2.30.
//
// NCCL reports tasks: a gather is several sends and receives. A bit of the plugin's mask selects a kind of event, together
// with its parents, as a plugin needs their handles.
#pragma once

#include "nccl.h"

#include <shared_mutex>

namespace fakegpu::nccl {

struct ProfilerPlugin;
struct ProfilerEvent;

struct ProfiledTask {
    Kind kind;
    const void* input;
    void* output;
    size_t count;
    int dtype;
    int root; // or the peer
    int mask = 0; // the events that were wanted when the program made the call
    void* group_call = nullptr;
    void* call = nullptr;
    void* handle = nullptr; // of the collective or message, which is the parent of its kernels
    std::vector<void*> kernels = {}; // one for each channel, while they run
};
using Plan = std::vector<ProfiledTask*>; // the tasks of one kernel

class Profiler : public std::enable_shared_from_this<Profiler> {
  public:
    // Loads the plugin that the environment names and introduces the communicator to it. Null: none, or it refused.
    static std::shared_ptr<Profiler> open(const Communicator& communicator);
    Profiler(int rank, int size) : rank_(rank), size_(size) {}
    ~Profiler() { close(); }
    // Nothing is reported from then on.
    void close();

    // The program makes a call inside of `depth` groups. Returns the tasks that result from it.
    std::vector<ProfiledTask> report_call(const Operation& operation, Stream* stream, bool is_captured, int depth);
    // The event of the kernel's launch; null: none.
    void* start_launch(const Plan& plan, Stream* stream);
    // NCCL hands tasks over to the device: within the call, or in a callback at each launch of a graph.
    void report_enqueued(const Plan& plan, bool is_counted);
    // The device begins and ends a task.
    void report_started(ProfiledTask& task);
    void report_ended(ProfiledTask& task);

    // NCCL matches kernels with tasks by two counts of work, the device's and the host's. The host counts a captured task
    // once, however often it is launched, unless the launches call back to it. No kernel is seen while the counts differ.
    void add_device_lead(int tasks) { device_lead_ += tasks; }
    bool can_see_kernels() const { return device_lead_ == 0; }

    void stop(void* handle);
    void record_group_call(void* handle, int state);

  private:
    void start_call(ProfiledTask& task, Stream* stream, bool is_captured);
    void* start(ProfilerEvent& event);

    const int rank_;
    const int size_;
    std::shared_mutex mutex_; // events share it, close() excludes them
    bool is_open_ = false;
    const ProfilerPlugin* plugin_ = nullptr;
    int version_ = 0;
    void* context_ = nullptr;
    std::atomic<int> device_lead_{0};
    std::atomic<uint64_t> sequence_numbers_[kKinds] = {};
};

// Whether launches of a graph call back to NCCL, which is expensive: only where the plugin wants to see kernels.
bool has_callback(const Plan& plan);

// The calls of this thread's outermost group share one event, which the first of them starts.
void report_group_end();  // ncclGroupEnd is called,
void report_group_done(); // and has handed everything over

} // namespace fakegpu::nccl
