// Lets a Work report its own completion and its end, so that the recorder need not hold it: a Work
// holds the tensors of its call, and a weak pointer to it would as well, since an object with weak
// pointers is not destroyed.

#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>

namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Counts how often this process was forked off. A forked child has the objects of its parent, whose
// locks may be held by threads that the child does not have.
std::atomic<uint64_t> fork_generation{0};

enum class WorkEvent { COMPLETED, FAILED, DESTROYED };

// Calls `receive` once, when the Work that owns this object completes, or is destroyed before.
template <class Receive> // void(WorkEvent), which must not throw
class WorkReport {
 public:
  explicit WorkReport(Receive receive)
      : receive_(std::move(receive)), generation_(fork_generation) {}
  WorkReport(const WorkReport&) = delete;
  WorkReport& operator=(const WorkReport&) = delete;
  ~WorkReport() { report_event(WorkEvent::DESTROYED); }

  void report_event(WorkEvent event) {
    if (is_reported_)
      return;
    is_reported_ = true;
    if (generation_ == fork_generation)
      receive_(event);
  }

 private:
  Receive receive_;
  uint64_t generation_;
  bool is_reported_ = false;
};

// The members of a Work that `Work::finish` uses, which are protected.
struct WorkMembers : c10d::Work {
  static std::mutex& get_mutex(c10d::Work& work) { return work.*(&WorkMembers::mutex_); }
  static bool is_completed(const c10d::Work& work) { return work.*(&WorkMembers::completed_); }
  static bool has_failed(const c10d::Work& work) {
    return static_cast<bool>(work.*(&WorkMembers::exception_));
  }
  static std::function<void()>& get_end_callback(c10d::Work& work) {
    return work.*(&WorkMembers::recordFunctionEndCallback_);
  }
};

// Calls `receive` when the Work completes, which must be by `Work::finish`, or when it is destroyed
// before. The call is made on the thread that does so, with the Work's mutex locked: it must
// destroy no Work, and wait for no thread that uses one.
template <class Receive>
void report_events(c10d::Work& work, Receive receive) {
  auto report = std::make_shared<WorkReport<Receive>>(std::move(receive));
  std::unique_lock<std::mutex> lock(WorkMembers::get_mutex(work));
  if (WorkMembers::is_completed(work)) {
    const bool has_failed = WorkMembers::has_failed(work);
    lock.unlock();
    return report->report_event(has_failed ? WorkEvent::FAILED : WorkEvent::COMPLETED);
  }
  auto& end_callback = WorkMembers::get_end_callback(work);
  // The profiler's callback, if there is one, is called as before.
  end_callback = [former = std::move(end_callback), report, &work] {
    if (former)
      former();
    report->report_event(
        WorkMembers::has_failed(work) ? WorkEvent::FAILED : WorkEvent::COMPLETED);
  };
}

} // namespace
