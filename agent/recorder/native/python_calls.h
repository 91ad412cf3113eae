// Calls from the library to Python, through operators of the library `hangwatch` that
// agent/recorder/kernels.py implements, and the faults that the library reports to Python.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>
#include <cstring>
#include <exception>
#include <string>
#include <typeinfo>

extern "C" { // Python functions that may be called without the GIL
int Py_IsInitialized(void);
__attribute__((weak)) int Py_IsFinalizing(void); // Python 3.13 and later
__attribute__((weak)) int _Py_IsFinalizing(void); // Python 3.12 and earlier
}

namespace {

using torch::jit::Stack;

std::atomic<uint64_t> fault_count{0};
char last_fault[200];

void record_fault(const char* message) noexcept {
  strncpy(last_fault, message, sizeof last_fault - 1);
  ++fault_count;
}

// A thread that requests the GIL while the interpreter exits is terminated or waits forever.
bool is_python_running() {
  return Py_IsInitialized() && !(Py_IsFinalizing ? Py_IsFinalizing() : _Py_IsFinalizing());
}

struct PythonError { // an exception that must be passed on to the user
  std::exception_ptr error;
};

// Takes the GIL. The operators swallow their own exceptions: a Python exception that arrives
// nevertheless is from a signal handler, such as KeyboardInterrupt, and is thrown as PythonError.
c10::IValue call_python(const c10::OperatorHandle& op, Stack stack) {
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::BackendSelect), &stack);
  } catch (const std::exception& error) {
    // Only the names are known here: torch/csrc/Exceptions.h and pybind11 need Python's headers.
    const char* type_name = typeid(error).name();
    if (strstr(type_name, "python_error") || strstr(type_name, "error_already_set"))
      throw PythonError{std::current_exception()};
    throw;
  }
  return stack.back();
}

c10::OperatorHandle find_operator(const std::string& name) { // "c10d::send" or "c10d::put.out"
  const size_t dot = name.find('.');
  const std::string overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  return c10::Dispatcher::singleton().findSchemaOrThrow(
      name.substr(0, dot).c_str(), overload.c_str());
}

// The number of the site of the call that this thread makes; 0 if unknown.
uint32_t find_site_in_python() {
  static const c10::OperatorHandle op = find_operator("hangwatch::_site");
  return static_cast<uint32_t>(call_python(op, {}).toInt());
}

struct ThreadActivity {
  bool is_in_torch; // the thread is in torch.distributed
  bool is_independent; // the thread is in code of its own
};

ThreadActivity inspect_thread(uint64_t thread) {
  static const c10::OperatorHandle op = find_operator("hangwatch::_inspect_thread");
  const int64_t bits = call_python(op, {static_cast<int64_t>(thread)}).toInt();
  return {bool(bits & 1), bool(bits & 2)};
}

} // namespace
