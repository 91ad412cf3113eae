// What the parts of the stand-in for libcudart share: error codes and the thread's last error.
#pragma once

#include "fakegpu.h"

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
