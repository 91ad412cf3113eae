// libcudart: streams, events, callbacks and host functions.
#include "cudart.h"

using namespace fakegpu;

EventStatePtr EventSlot::load() {
    std::lock_guard<std::mutex> lock(mutex);
    return state;
}
void EventSlot::store(EventStatePtr recorded) {
    std::lock_guard<std::mutex> lock(mutex);
    state = std::move(recorded);
}

namespace {

constexpr unsigned kExternal = 1; // the flag of events that a graph exchanges with what runs outside of it

} // namespace

FAKEGPU_API cudaError cudaStreamCreateWithPriority(void** stream, unsigned, int priority) {
    *stream = create_stream(current_device(), priority);
    return kSuccess;
}
FAKEGPU_API cudaError cudaStreamCreateWithFlags(void** stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}
FAKEGPU_API cudaError cudaStreamCreate(void** stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
FAKEGPU_API cudaError cudaStreamDestroy(void* stream) {
    destroy_stream(resolve_stream(stream));
    return kSuccess;
}
FAKEGPU_API cudaError cudaStreamGetPriority(void* stream, int* priority) {
    *priority = stream_priority(resolve_stream(stream));
    return kSuccess;
}
FAKEGPU_API cudaError cudaStreamQuery(void* stream) {
    const CaptureError error = check_synchronization(resolve_stream(stream));
    if (error != CaptureError::none) return fail_unless_none(error);
    return is_stream_idle(resolve_stream(stream)) ? kSuccess : fail(kNotReady);
}
FAKEGPU_API cudaError cudaStreamSynchronize(void* stream) {
    const CaptureError error = check_synchronization(resolve_stream(stream));
    if (error != CaptureError::none) return fail_unless_none(error);
    synchronize_stream(resolve_stream(stream));
    return kSuccess;
}
FAKEGPU_API cudaError cudaDeviceSynchronize() {
    const CaptureError error = check_device_synchronization(current_device());
    if (error != CaptureError::none) return fail_unless_none(error);
    synchronize_device(current_device());
    return kSuccess;
}
FAKEGPU_API cudaError cudaStreamWaitEvent(void* handle, Event* event, unsigned flags) {
    Stream* stream = resolve_stream(handle);
    if (flags == kExternal && is_capturing(stream)) {
        auto prepare = [slot = event->slot]() -> Task {
            return [state = slot->load()] { synchronize_event(state); };
        };
        capture_node(stream, prepare, true);
        return kSuccess;
    }
    EventStatePtr state = event->slot->load();
    if (!state) return kSuccess;
    if (state->capture || is_capturing(stream)) return fail_unless_none(join_capture(stream, *state));
    wait_event(stream, std::move(state));
    return kSuccess;
}
FAKEGPU_API cudaError cudaLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
    enqueue(resolve_stream(stream), [function, data] { function(data); }, false);
    return kSuccess;
}
FAKEGPU_API cudaError cudaStreamAddCallback(void* stream, void (*callback)(void*, cudaError, void*), void* data, unsigned) {
    enqueue(resolve_stream(stream), [stream, callback, data] { callback(stream, kSuccess, data); }, false);
    return kSuccess;
}

FAKEGPU_API cudaError cudaEventCreateWithFlags(Event** event, unsigned) {
    *event = new Event;
    return kSuccess;
}
FAKEGPU_API cudaError cudaEventCreate(Event** event) { return cudaEventCreateWithFlags(event, 0); }
FAKEGPU_API cudaError cudaEventDestroy(Event* event) {
    delete event;
    return kSuccess;
}
FAKEGPU_API cudaError cudaEventRecord(Event* event, void* stream) {
    event->slot->store(record_event(resolve_stream(stream)));
    return kSuccess;
}
FAKEGPU_API cudaError cudaEventRecordWithFlags(Event* event, void* handle, unsigned flags) {
    Stream* stream = resolve_stream(handle);
    if (flags != kExternal || !is_capturing(stream)) return cudaEventRecord(event, handle);
    auto prepare = [slot = event->slot]() -> Task {
        auto state = std::make_shared<EventState>();
        slot->store(state);
        return [state] { complete_event(*state); };
    };
    capture_node(stream, prepare, false);
    return kSuccess;
}
FAKEGPU_API cudaError cudaEventQuery(Event* event) {
    const CaptureError error = check_unsafe_call();
    if (error != CaptureError::none) return fail_unless_none(error);
    EventStatePtr state = event->slot->load();
    if (state && state->capture) return fail_unless_none(CaptureError::captured_event);
    return !state || state->is_done ? kSuccess : fail(kNotReady);
}
FAKEGPU_API cudaError cudaEventSynchronize(Event* event) {
    const EventStatePtr state = event->slot->load();
    if (state && state->capture) return fail_unless_none(CaptureError::captured_event);
    while (spins_in_synchronize() && state && !state->is_done) {
    }
    synchronize_event(state);
    return kSuccess;
}
FAKEGPU_API cudaError cudaEventElapsedTime(float* milliseconds, Event* from, Event* to) {
    EventStatePtr begin = from->slot->load();
    EventStatePtr end = to->slot->load();
    if (!begin || !end || begin->capture || end->capture) return fail(kInvalidValue);
    if (!begin->is_done || !end->is_done) return fail(kNotReady);
    *milliseconds = static_cast<float>(end->completed_at_ms - begin->completed_at_ms);
    return kSuccess;
}
FAKEGPU_API cudaError cudaEventElapsedTime_v2(float* milliseconds, Event* from, Event* to) {
    return cudaEventElapsedTime(milliseconds, from, to);
}
