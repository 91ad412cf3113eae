// Issues operations: collects those of a group, and puts one task per communicator into its stream.
#include "nccl_profiler.h"

#include <future>
#include <optional>

namespace fakegpu::nccl {

namespace {

struct Call {
    Operation operation;
    std::vector<ProfiledTask> tasks; // what a profiler plugin sees of it
};

struct Pending {
    CommunicatorPtr communicator;
    Stream* stream;
    std::vector<Call> calls;
};

// One execution of what is pending: the only one, or that of one launch of a graph.
struct Work {
    explicit Work(Pending pending) : pending(std::move(pending)) {}

    Pending pending;
    CollectivePlan faults;
    uint64_t generation = 0;
    uint64_t ticket = 0;
    bool is_replay = false;
    bool is_visible = false; // to a profiler plugin, on the device
    std::optional<std::promise<void>> reported; // where there is a plugin: it knows the tasks, so their kernels may follow
};
using WorkPtr = std::shared_ptr<Work>;

thread_local int tls_group_depth = 0;
thread_local std::vector<Pending> tls_pending;

// Collectives come first, as NCCL puts them and messages into different kernels.
std::vector<Plan> make_plans(std::vector<Call>& calls) {
    Plan collectives;
    Plan messages;
    for (Call& call : calls) {
        for (ProfiledTask& task : call.tasks) (is_point_to_point(task.kind) ? messages : collectives).push_back(&task);
    }
    std::vector<Plan> plans;
    if (!collectives.empty()) plans.push_back(std::move(collectives));
    if (!messages.empty()) plans.push_back(std::move(messages));
    return plans;
}

void apply_faults(Work& work) {
    Communicator& communicator = *work.pending.communicator;
    if (work.faults.is_stalled) {
        block_until([&] { return communicator.is_aborted || is_stall_released(work.generation); });
    }
    if (work.faults.delay_ms > 0) {
        const double until = now_ms() + work.faults.delay_ms;
        block_until([&] { return communicator.is_aborted || now_ms() >= until; });
    }
}

// Calls that run together: one collective, or all sends and receives.
using Batch = std::vector<Call*>;

std::vector<Batch> make_batches(std::vector<Call>& calls) {
    std::vector<Batch> batches;
    Batch transfers;
    for (Call& call : calls) {
        if (is_point_to_point(call.operation.kind)) transfers.push_back(&call);
        else batches.push_back({&call});
    }
    if (!transfers.empty()) batches.push_back(std::move(transfers));
    return batches;
}

void run_batch(Communicator& communicator, const Batch& batch) {
    if (!is_point_to_point(batch.front()->operation.kind)) return run_collective(communicator, batch.front()->operation);
    std::vector<Operation> transfers;
    for (const Call* call : batch) transfers.push_back(call->operation);
    run_point_to_point(communicator, transfers);
}

void run_batches(Work& work) {
    Communicator& communicator = *work.pending.communicator;
    Profiler* profiler = work.is_visible ? communicator.profiler.get() : nullptr;
    bool is_first = true;
    for (const Batch& batch : make_batches(work.pending.calls)) {
        for (Call* call : batch) {
            for (ProfiledTask& task : call->tasks) {
                if (profiler) profiler->report_started(task);
            }
        }
        if (is_first) apply_faults(work);
        is_first = false;
        if (communicator.is_aborted) return;
        run_batch(communicator, batch);
        if (communicator.is_aborted) return;
        for (Call* call : batch) {
            for (ProfiledTask& task : call->tasks) {
                if (profiler) profiler->report_ended(task);
            }
        }
    }
}

void run_work(Work& work) {
    Communicator& communicator = *work.pending.communicator;
    if (work.faults.kernel_before) work.faults.kernel_before();
    {
        std::unique_lock<std::mutex> lock(communicator.order_mutex);
        communicator.order_changed.wait(lock, [&] { return communicator.finished == work.ticket; });
    }
    if (communicator.profiler && work.is_replay) {
        for (const Plan& plan : make_plans(work.pending.calls)) {
            if (has_callback(plan)) communicator.profiler->report_enqueued(plan, true);
        }
    } else if (work.reported) {
        work.reported->get_future().wait();
    }
    run_batches(work);
    std::lock_guard<std::mutex> lock(communicator.order_mutex);
    ++communicator.finished;
    communicator.order_changed.notify_all();
}

WorkPtr prepare_work(Pending pending, bool is_replay) {
    auto work = std::make_shared<Work>(std::move(pending));
    Communicator& communicator = *work->pending.communicator;
    work->faults = plan_collective(is_replay);
    work->generation = stall_generation();
    work->is_replay = is_replay;
    if (communicator.profiler && !is_replay) work->reported.emplace();
    if (communicator.profiler && is_replay) {
        for (const Plan& plan : make_plans(work->pending.calls)) {
            if (!has_callback(plan)) communicator.profiler->add_device_lead(static_cast<int>(plan.size()));
        }
    }
    std::lock_guard<std::mutex> lock(communicator.order_mutex);
    work->ticket = communicator.issued++;
    work->is_visible = communicator.profiler && communicator.profiler->can_see_kernels();
    return work;
}

// Launches the kernels, by `launch`, and reports it. What is captured without a callback is reported now and never again.
template <typename Launch> void launch_plans(Pending& pending, bool is_captured, Launch launch) {
    Profiler* profiler = pending.communicator->profiler.get();
    if (!profiler) return launch();
    bool is_launched = false;
    for (const Plan& plan : make_plans(pending.calls)) {
        void* event = profiler->start_launch(plan, pending.stream);
        if (!is_launched) launch();
        is_launched = true;
        profiler->stop(event);
        if (is_captured && has_callback(plan)) continue;
        profiler->report_enqueued(plan, !is_captured);
        if (is_captured) profiler->add_device_lead(-static_cast<int>(plan.size()));
    }
    if (!is_launched) launch();
}

void submit(Pending pending) {
    Stream* stream = pending.stream;
    if (is_capturing(stream)) {
        auto prepare = [pending]() -> Task {
            return [work = prepare_work(pending, true)] { run_work(*work); };
        };
        launch_plans(pending, true, [&] { capture_node(stream, prepare, true); });
        return;
    }
    WorkPtr work = prepare_work(std::move(pending), false);
    launch_plans(work->pending, false, [&] { enqueue(stream, [work] { run_work(*work); }, false); });
    if (work->reported) work->reported->set_value();
    after_collective();
}

} // namespace

int issue(void* handle, Stream* stream, const Operation& operation) {
    CommunicatorPtr communicator = find_communicator(handle);
    if (!communicator) return kInvalidArgument;
    Call call{operation, {}};
    if (communicator->profiler) {
        call.tasks = communicator->profiler->report_call(operation, stream, is_capturing(stream), tls_group_depth);
    }
    if (!tls_group_depth) {
        report_group_end();
        submit(Pending{communicator, stream, {std::move(call)}});
        report_group_done();
        return kSuccess;
    }
    for (Pending& pending : tls_pending) {
        if (pending.communicator == communicator && pending.stream == stream) {
            pending.calls.push_back(std::move(call));
            return kSuccess;
        }
    }
    tls_pending.push_back(Pending{communicator, stream, {std::move(call)}});
    return kSuccess;
}

void begin_group() { ++tls_group_depth; }

int end_group() {
    if (!tls_group_depth) return kInvalidUsage;
    if (--tls_group_depth) return kSuccess;
    std::vector<Pending> all;
    all.swap(tls_pending);
    report_group_end();
    for (Pending& pending : all) submit(std::move(pending));
    report_group_done();
    return kSuccess;
}

} // namespace fakegpu::nccl
