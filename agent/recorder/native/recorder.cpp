// The native recorder: kernels that write the ring without the GIL, as the Python modules in
// agent/recorder do. This file has the functions that Python calls, through ctypes
// (agent/recorder/native/library.py).
//
// Python interprets each kind of call once: the first call of a kind gets a plan from Python, by
// calling an operator `hangwatch::NAME` with the same arguments; further calls look the plan up. So
// both recorders write the same hashes and names. Python also finds the user's line of a call and,
// when another thread than before makes a call, inspects the former thread. Everything else happens
// here.
//
// The library needs torch's headers, not Python's. It is one translation unit: the headers beside
// this file are parts of it, so everything in them has internal linkage and can be inlined.

// The headers of libstdc++ take this variable from glibc 2.32 and later; a prebuilt library must
// also work with glibc 2.28. Zero means that there may be several threads.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;

#include "kernel.h"
#include "python_frames.h"

#include <torch/library.h>

#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>

namespace {

// The library of the kernels of operator `name`. Kernels stay registered, so it is never freed.
torch::Library& open_library(const std::string& name) {
  static std::unordered_map<std::string, torch::Library*> libraries;
  const std::string name_space = name.substr(0, name.find(':'));
  auto& library = libraries[name_space];
  if (!library)
    library = new torch::Library(
        torch::Library::IMPL, name_space, c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
  return *library;
}

} // namespace

extern "C" {

// This function is called once, before all other functions.
void hw_initialize_library(FrameLayout layout) {
  frame_layout = layout;
  pthread_atfork(nullptr, nullptr, [] {
    current_recorder = nullptr; // the ring is the parent's
    ++fork_generation;
    this_thread_id = 0;
  });
}

// Registers the kernel of operator `name`, such as "c10d::send"; hangwatch::`planner` must be defined.
// Returns an error message, or null.
const char* hw_register_kernel(const char* name, const char* planner, bool compares_all_tensors) {
  static std::string problem;
  try {
    const auto op = find_operator(name);
    auto kernel = std::make_unique<RecordingKernel>(
        op, find_operator(std::string("hangwatch::") + planner), compares_all_tensors);
    auto function = torch::CppFunction::makeFromBoxedFunctor(std::move(kernel));
    open_library(name).impl(strstr(name, "::") + 2, std::move(function));
    return nullptr;
  } catch (const std::exception& error) {
    problem = error.what();
    return problem.c_str();
  }
}

CallRecorder* hw_create_recorder(char* ring, uint64_t records_offset, uint64_t record_slots) {
  return new CallRecorder(ring, records_offset, record_slots);
}

// Makes all kernels use the recorder; null stops recording.
void hw_set_current_recorder(CallRecorder* recorder) {
  current_recorder = recorder;
}

// Calls the function with the stream and the number of each call before torch makes it, and with
// zeros afterwards; null calls none.
void hw_set_call_marker(CallMarker marker) {
  call_marker = marker;
}

uint64_t hw_update_streams(CallRecorder* recorder) {
  return recorder->update_streams();
}

// The number of the reduce op of the call that a planner of this thread is reading; -1 if it has
// none.
int64_t hw_get_planned_reduce_op() {
  return planned_reduce_op;
}

// Records that this thread begins a batch of sends and receives.
void hw_begin_batch() {
  batch_began_ns = read_clock_ns();
}

void hw_clear_plans(CallRecorder* recorder) {
  recorder->clear_plans();
}

// Declares the CodeOrigin of a code object.
void hw_set_code_origin(CallRecorder* recorder, uint64_t code, uint8_t origin) {
  recorder->set_code_origin(code, origin);
}

void hw_clear_code_origins(CallRecorder* recorder) {
  recorder->clear_code_origins();
}

// `first_word` is the stream's slot in the ring, in words of 8 bytes from its beginning, and
// `loss_word` its word of the loss table.
Stream* hw_open_stream(
    CallRecorder* recorder, uint32_t uid, uint64_t first_word, uint64_t loss_word) {
  return recorder->open_stream(uid, first_word, loss_word);
}

// Marks a stream as incomplete from call `from_seq` on; 0 means from its next call on.
void hw_mark_incomplete(
    CallRecorder* recorder, Stream* stream, uint64_t reason, uint64_t from_seq) {
  recorder->mark_incomplete(*stream, reason, from_seq);
}

// The number of calls that the library failed to record, without knowing their streams.
uint64_t hw_get_lost_count(CallRecorder* recorder) {
  return recorder->lost_count();
}

void hw_close_stream(CallRecorder* recorder, Stream* stream) {
  recorder->close_stream(stream);
}

// Records the beginning of a call that Python records, such as a declared one; `packed_body` is a
// RecordBody.
void hw_enter_call(
    CallRecorder* recorder, Stream* stream, uint64_t agreement_hash, const char* packed_body,
    uint64_t blocked_thread, int completion_mode, Call* call) {
  RecordBody record_body;
  memcpy(&record_body, packed_body, sizeof record_body);
  *call = recorder->enter_call(
      *stream, agreement_hash, record_body, blocked_thread, completion_mode);
}

// Records the beginning of calls that were planned. Returns false if Python code that it called raised
// an exception, which `run_callback` in library.py keeps.
bool hw_enter_planned_calls(CallRecorder* recorder, PlannedCall* calls, uint64_t count) {
  try {
    recorder->enter_planned_calls(calls, count);
    return true;
  } catch (const PythonError&) {
    return false;
  } catch (const std::exception& error) {
    record_fault(error.what());
  }
  recorder->record_lost_call();
  return true;
}

void hw_retract_call(CallRecorder* recorder, const Call* call) {
  recorder->retract_call(*call);
}

void hw_finish_call(CallRecorder* recorder, const Call* call, bool has_raised) {
  recorder->finish_call(*call, has_raised);
}

uint64_t hw_get_fault_count() {
  return fault_count;
}

const char* hw_get_last_fault() {
  return last_fault;
}

// Writes up to `max_frames` frames of the calling thread, newest first, as code objects and the low
// halves of their instructions. Returns their number.
int hw_read_frames(uint64_t* codes, uint32_t* instructions, int max_frames) {
  int count = 0;
  walk_frames([&](CodePosition position) {
    if (count < max_frames) {
      codes[count] = position.code;
      instructions[count] = position.instruction;
    }
    return ++count < max_frames;
  });
  return count;
}

// The last two functions serve the test that both recorders sample the same calls.

int hw_compute_sampling_level(uint64_t seq) {
  return compute_sampling_level(seq);
}

int hw_get_min_timed_level() {
  return MIN_TIMED_LEVEL;
}

} // extern "C"
