// libcudart: streams, events, callbacks and host functions.
#include "cudart.h"

using namespace fakegpu;

namespace {

struct Event {
    std::mutex mutex;
    EventStatePtr state; // null until it is recorded

    EventStatePtr load() {
        std::lock_guard<std::mutex> lock(mutex);
        return state;
    }
};

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
    return is_stream_idle(resolve_stream(stream)) ? kSuccess : fail(kNotReady);
}
FAKEGPU_API cudaError cudaStreamSynchronize(void* stream) {
    synchronize_stream(resolve_stream(stream));
    return kSuccess;
}
FAKEGPU_API cudaError cudaDeviceSynchronize() {
    synchronize_device(current_device());
    return kSuccess;
}
FAKEGPU_API cudaError cudaStreamWaitEvent(void* stream, Event* event, unsigned) {
    wait_event(resolve_stream(stream), event->load());
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

// There are no graphs: nothing is ever captured.
FAKEGPU_API cudaError cudaStreamIsCapturing(void*, int* status) {
    *status = 0;
    return kSuccess;
}
FAKEGPU_API cudaError cudaStreamGetCaptureInfo_v2(void*, int* status) {
    *status = 0;
    return kSuccess;
}
FAKEGPU_API cudaError cudaStreamGetCaptureInfo_v3(void*, int* status) {
    *status = 0;
    return kSuccess;
}
FAKEGPU_API cudaError cudaStreamGetCaptureInfo(void*, int* status) {
    *status = 0;
    return kSuccess;
}
FAKEGPU_API cudaError cudaStreamBeginCapture(void*, int) { return fail(kNotSupported); }
FAKEGPU_API cudaError cudaThreadExchangeStreamCaptureMode(int*) { return kSuccess; }

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
    EventStatePtr recorded = record_event(resolve_stream(stream));
    std::lock_guard<std::mutex> lock(event->mutex);
    event->state = std::move(recorded);
    return kSuccess;
}
FAKEGPU_API cudaError cudaEventRecordWithFlags(Event* event, void* stream, unsigned) { return cudaEventRecord(event, stream); }
FAKEGPU_API cudaError cudaEventQuery(Event* event) {
    EventStatePtr state = event->load();
    return !state || state->is_done ? kSuccess : fail(kNotReady);
}
FAKEGPU_API cudaError cudaEventSynchronize(Event* event) {
    const EventStatePtr state = event->load();
    while (spins_in_synchronize() && state && !state->is_done) {
    }
    synchronize_event(state);
    return kSuccess;
}
FAKEGPU_API cudaError cudaEventElapsedTime(float* milliseconds, Event* from, Event* to) {
    EventStatePtr begin = from->load();
    EventStatePtr end = to->load();
    if (!begin || !end) return fail(kInvalidValue);
    if (!begin->is_done || !end->is_done) return fail(kNotReady);
    *milliseconds = static_cast<float>(end->completed_at_ms - begin->completed_at_ms);
    return kSuccess;
}
FAKEGPU_API cudaError cudaEventElapsedTime_v2(float* milliseconds, Event* from, Event* to) {
    return cudaEventElapsedTime(milliseconds, from, to);
}
