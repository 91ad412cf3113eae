// The kernel of an operator that communicates: torch calls it in place of the backend's, it records
// the call, and passes it on. Only the user's own exceptions leave it.

#pragma once

#include "call_recorder.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <cxxabi.h>

#include <atomic>
#include <exception>
#include <string>
#include <vector>

namespace {

// The recorder that all kernels use, or null. Earlier recorders are never freed: a thread may still
// use one, and its mutex may stay locked after a fork.
std::atomic<CallRecorder*> current_recorder{nullptr};

// The reduce op of the call for which Python makes a plan; -1 if it has none. Some versions of
// torch, such as 2.9, do not show it to Python.
thread_local int64_t planned_reduce_op = -1;

// Tells the plugin for NCCL which call of torch this thread makes; null if there is no plugin.
using CallMarker = void (*)(uint32_t stream, uint64_t seq);
std::atomic<CallMarker> call_marker{nullptr};

class MarkedCall { // as long as it exists
 public:
  explicit MarkedCall(const Call& call) : marker_(call_marker.load(std::memory_order_acquire)) {
    if (marker_)
      marker_(call.stream->uid, call.seq);
  }
  ~MarkedCall() {
    if (marker_)
      marker_(0, 0);
  }
  MarkedCall(const MarkedCall&) = delete;
  MarkedCall& operator=(const MarkedCall&) = delete;

 private:
  CallMarker marker_;
};

class RecordingKernel : public c10::OperatorKernel {
 public:
  RecordingKernel(
      const c10::OperatorHandle& op, const c10::OperatorHandle& planner, bool compares_all_tensors)
      : planner_(planner),
        argument_count_(op.schema().arguments().size()),
        max_compared_tensors_(compares_all_tensors ? SIZE_MAX : MAX_COMPARED_TENSORS) {
    for (const auto& argument : op.schema().arguments()) {
      const std::string type = argument.type()->repr_str();
      is_reduce_op_.push_back(type.find("c10d.ReduceOp") != std::string::npos);
      is_point_to_point_ |= argument.name() == "tag";
    }
  }

  // torch calls this in place of the backend's kernel.
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    static const c10::DispatchKeySet lower_keys(
        c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
    CallRecorder* const recorder = current_recorder.load(std::memory_order_acquire);
    Call call;
    if (recorder && can_communicate(keys) &&
        !run_guarded([&] { call = record_call(*recorder, *stack); }))
      run_guarded([&] { recorder->record_lost_call(); });
    if (!call.stream)
      return op.redispatchBoxed(keys & lower_keys, stack);
    try {
      const MarkedCall marked(call);
      op.redispatchBoxed(keys & lower_keys, stack);
    } catch (const std::exception& error) {
      run_guarded([&] { recorder->fail_call(call, judge_failure(error, call.failure_rule)); });
      throw;
    } catch (...) { // the thread may be cancelled, for example
      run_guarded([&] { recorder->finish_call(call, true); });
      throw;
    }
    if (!run_guarded([&] { leave_call(*recorder, call, *stack); }))
      run_guarded([&] { recorder->lose_completion(call); });
  }

 private:
  // See `can_communicate` in python_kernel.py.
  static bool can_communicate(c10::DispatchKeySet keys) {
    return !keys.has_backend(c10::BackendComponent::MetaBit) &&
        !keys.has_any(c10::DispatchKeySet(c10::DispatchKey::NestedTensor));
  }

  // Returns false after an error of ours, which is recorded.
  template <class Action> // void()
  static bool run_guarded(Action action) {
    try {
      action();
      return true;
    } catch (const PythonError& raised) {
      std::rethrow_exception(raised.error);
    } catch (const abi::__forced_unwind&) { // the thread is being cancelled
      throw;
    } catch (const std::exception& error) {
      record_fault(error.what());
    } catch (...) {
      record_fault("an unknown C++ exception");
    }
    return false;
  }

  Call record_call(CallRecorder& recorder, const Stack& stack) {
    thread_local CallKey key;
    key.clear();
    key.push_back(reinterpret_cast<int64_t>(this));
    const c10::IValue* arguments = stack.data() + stack.size() - argument_count_;
    for (size_t i = 0; i < argument_count_; ++i)
      append_argument(arguments[i], is_reduce_op_[i], max_compared_tensors_, key);
    if (is_point_to_point_)
      append_callers(key);
    return recorder.record_call(
        key, [&](CallPlan& plan) { return fetch_plan(recorder, arguments, plan); });
  }

  static void leave_call(CallRecorder& recorder, const Call& call, const Stack& stack) {
    const int mode = call.completion_mode;
    WorkPtr work;
    if (mode == BY_WORK || mode == BY_TIMED_WORK || has_reporting_work(mode))
      work = get_work(stack);
    if (call.completion_mode == BY_TIMED_WORK)
      recorder.time_completion(call, work);
    recorder.leave_call(call, std::move(work));
  }

  static WorkPtr get_work(const Stack& stack) { // null if the operator returned none
    return c10::static_intrusive_pointer_cast<c10d::Work>(
        stack.empty() ? nullptr : unbox(stack.back()));
  }

  // Fetches a plan from Python: the list that `encode_plan` in library.py makes. Returns false if
  // there is none this time.
  bool fetch_plan(CallRecorder& recorder, const c10::IValue* arguments, CallPlan& plan) const {
    if (!is_python_running()) {
      recorder.record_lost_call();
      return false;
    }
    planned_reduce_op = find_reduce_op(arguments);
    const auto fields =
        call_python(planner_, Stack(arguments, arguments + argument_count_)).toIntVector();
    if (fields.size() != 10)
      return false;
    plan.stream = reinterpret_cast<Stream*>(fields[0]);
    if (!plan.stream)
      return true;
    plan.agreement_hash = static_cast<uint64_t>(fields[1]);
    plan.record_body.uid = plan.stream->uid;
    plan.record_body.signature = static_cast<uint32_t>(fields[2]);
    plan.record_body.bytes = static_cast<uint64_t>(fields[3]);
    plan.record_body.peer = static_cast<int32_t>(fields[4]);
    plan.record_body.tag = static_cast<int32_t>(fields[5]);
    plan.record_body.flags = static_cast<uint32_t>(fields[6]);
    plan.is_blocking = fields[7];
    plan.completion_mode = static_cast<int>(fields[8]);
    plan.failure_rule = static_cast<int>(fields[9]);
    return true;
  }

  int64_t find_reduce_op(const c10::IValue* arguments) const { // -1 if there is none
    for (size_t i = 0; i < argument_count_; ++i)
      if (is_reduce_op_[i])
        if (const auto object = unbox(arguments[i]))
          return static_cast<c10d::ReduceOp*>(object.get())->op_;
    return -1;
  }

  c10::OperatorHandle planner_;
  size_t argument_count_, max_compared_tensors_;
  std::vector<bool> is_reduce_op_; // one for each argument
  bool is_point_to_point_ = false;
};

} // namespace
