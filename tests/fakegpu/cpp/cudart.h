// What the parts of the stand-in for libcudart share: error codes and the thread's last error.
#pragma once

#include "graphs.h"

using cudaError = int;

constexpr cudaError kSuccess = 0;
constexpr cudaError kInvalidValue = 1;
constexpr cudaError kOutOfMemory = 2;
constexpr cudaError kNoDevice = 100;
constexpr cudaError kInvalidDevice = 101;
constexpr cudaError kNotReady = 600;
constexpr cudaError kNotSupported = 801;

// Records the error for cudaGetLastError and returns it.
cudaError fail(cudaError code);
cudaError fail_unless_none(fakegpu::CaptureError error);

// An event keeps what it was last recorded as. A graph's nodes share that with it, as they may outlive the event.
struct EventSlot {
    std::mutex mutex;
    fakegpu::EventStatePtr state; // null until it is recorded

    fakegpu::EventStatePtr load();
    void store(fakegpu::EventStatePtr recorded);
};
struct Event {
    std::shared_ptr<EventSlot> slot = std::make_shared<EventSlot>();
};
