// Issues operations: collects those of a group, and puts one task per communicator into its stream.
#include "nccl.h"

namespace fakegpu::nccl {

namespace {

struct Pending {
    CommunicatorPtr communicator;
    Stream* stream;
    std::vector<Operation> operations;
};

thread_local int tls_group_depth = 0;
thread_local std::vector<Pending> tls_pending;

bool is_point_to_point(const Operation& operation) {
    return operation.kind == Kind::send || operation.kind == Kind::recv;
}

void run_operations(Communicator& communicator, const std::vector<Operation>& operations) {
    std::vector<Operation> transfers;
    for (const Operation& operation : operations) {
        if (is_point_to_point(operation)) transfers.push_back(operation);
        else run_collective(communicator, operation);
    }
    if (!transfers.empty()) run_point_to_point(communicator, transfers);
}

void stall(Communicator& communicator, uint64_t generation) {
    block_until([&communicator, generation] { return communicator.is_aborted || is_stall_released(generation); });
}

void submit(Pending pending) {
    const CollectivePlan plan = plan_collective();
    const uint64_t generation = stall_generation();
    uint64_t ticket;
    {
        std::lock_guard<std::mutex> lock(pending.communicator->order_mutex);
        ticket = pending.communicator->issued++;
    }
    enqueue(
        pending.stream,
        [pending, plan, generation, ticket] {
            Communicator& communicator = *pending.communicator;
            {
                std::unique_lock<std::mutex> lock(communicator.order_mutex);
                communicator.order_changed.wait(lock, [&] { return communicator.finished == ticket; });
            }
            if (plan.is_stalled) stall(communicator, generation);
            if (plan.delay_ms > 0) {
                const double until = now_ms() + plan.delay_ms;
                block_until([&] { return communicator.is_aborted || now_ms() >= until; });
            }
            if (!communicator.is_aborted) run_operations(communicator, pending.operations);
            std::lock_guard<std::mutex> lock(communicator.order_mutex);
            ++communicator.finished;
            communicator.order_changed.notify_all();
        },
        false);
    after_collective();
}

} // namespace

int issue(void* handle, Stream* stream, const Operation& operation) {
    CommunicatorPtr communicator = find_communicator(handle);
    if (!communicator) return kInvalidArgument;
    if (!tls_group_depth) {
        submit(Pending{communicator, stream, {operation}});
        return kSuccess;
    }
    for (Pending& pending : tls_pending) {
        if (pending.communicator == communicator && pending.stream == stream) {
            pending.operations.push_back(operation);
            return kSuccess;
        }
    }
    tls_pending.push_back(Pending{communicator, stream, {operation}});
    return kSuccess;
}

void begin_group() { ++tls_group_depth; }

int end_group() {
    if (!tls_group_depth) return kInvalidUsage;
    if (--tls_group_depth) return kSuccess;
    std::vector<Pending> all;
    all.swap(tls_pending);
    for (Pending& pending : all) submit(std::move(pending));
    return kSuccess;
}

} // namespace fakegpu::nccl
