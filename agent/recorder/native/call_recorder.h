// Records calls into one ring: the position of each stream, the records of its calls, and when they
// completed. Everything happens under one mutex, which is held for some 100 ns, and never while a
// thread waits for the GIL, for torch, or for a destructor of torch's.

#pragma once

#include "call_plans.h"
#include "call_sites.h"
#include "python_calls.h"
#include "record_table.h"
#include "streams.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <vector>

namespace {

uint64_t get_this_thread() { return static_cast<uint64_t>(pthread_self()); }

thread_local uint32_t this_thread_id = 0; // 0: not known yet
// When this thread began its last batch of sends and receives, which have no order among themselves.
thread_local uint64_t batch_began_ns = 0;

// The operating system's id of this thread, by which /proc and py-spy name it.
uint32_t get_thread_id() {
  if (!this_thread_id)
    this_thread_id = static_cast<uint32_t>(syscall(SYS_gettid));
  return this_thread_id;
}

class CallRecorder {
 public:
  CallRecorder(char* ring, uint64_t records_offset, uint64_t record_slots)
      : ring_(ring), records_(ring + records_offset, record_slots) {}

  // Records a call. Without a plan for its kind, `fetch_plan` makes one, and returns whether it is
  // also valid for later calls.
  template <class FetchPlan> // bool(CallPlan&)
  Call record_call(const CallKey& key, FetchPlan fetch_plan) {
    PendingWorks finished;
    Lock lock(mutex_);
    CallPlan plan;
    if (const CallPlan* cached = plans_.find_plan(key)) {
      plan = *cached;
    } else {
      const CallKey own_key = key; // the caller may reuse its key while the lock is released
      const uint64_t generation = plans_.generation();
      lock.unlock();
      const bool is_reusable = fetch_plan(plan);
      lock.lock();
      if (is_reusable)
        plans_.add_plan(own_key, plan, generation);
    }
    if (!plan.stream)
      return {};
    plan.record_body.site = sites_.find_site(lock);
    const uint64_t this_thread = get_this_thread();
    plan.record_body.thread = get_thread_id();
    const uint64_t blocked_thread = plan.is_blocking ? this_thread : 0;
    Call call = enter_call(
        *plan.stream, plan.agreement_hash, plan.record_body, blocked_thread, plan.completion_mode,
        finished, lock);
    call.failure_rule = plan.failure_rule;
    return call;
  }

  // Records a call whose details are all known.
  Call enter_call(
      Stream& stream, uint64_t agreement_hash, const RecordBody& record_body,
      uint64_t blocked_thread, int completion_mode) {
    PendingWorks finished;
    Lock lock(mutex_);
    return enter_call(
        stream, agreement_hash, record_body, blocked_thread, completion_mode, finished, lock);
  }

  // Records calls that are made together and whose completion nothing shows, such as the replay of a
  // CUDA graph.
  void enter_planned_calls(PlannedCall* calls, uint64_t count) {
    PendingWorks finished;
    Lock lock(mutex_);
    const uint32_t site = sites_.find_site(lock);
    for (PlannedCall* planned = calls; planned != calls + count; ++planned) {
      RecordBody record_body = planned->record_body;
      record_body.site = site;
      record_body.thread = get_thread_id();
      const Call call = enter_call(
          *planned->stream, planned->agreement_hash, record_body, 0, UNOBSERVABLE, finished, lock);
      planned->seq = call.seq;
    }
  }

  // Records that the operator returned.
  void leave_call(const Call& call, WorkPtr work) {
    Lock lock(mutex_);
    if (call.completion_mode == AT_RETURN)
      return complete_call(call);
    if (call.completion_mode == UNOBSERVABLE || call.stream->completed == UNKNOWN_COMPLETED)
      return;
    PendingWorks& works = call.stream->pending_works;
    if (!work)
      return works.push_back({call, Completion::UNKNOWN, nullptr});
    if (!has_reporting_work(call.completion_mode))
      return works.push_back({call, Completion::POLLED, std::move(work)});
    works.push_back({call, Completion::TO_BE_REPORTED, nullptr});
    lock.unlock();
    report_events(*work, [this, call](WorkEvent event) { receive_event(call, event); });
  }

  // Records that a call was complete when it returned, or raised an exception.
  void finish_call(const Call& call, bool has_raised) {
    Lock lock(mutex_);
    if (has_raised)
      records_.add_flags(call.index, RAISED);
    complete_call(call);
  }

  // Records that a call raised an exception, and takes it back if it had not communicated.
  void fail_call(const Call& call, FailureOutcome outcome) {
    if (outcome == FailureOutcome::NOT_MADE)
      return retract_call(call);
    if (outcome == FailureOutcome::UNKNOWN)
      mark_incomplete(*call.stream, CALL_RAISED, call.seq);
    finish_call(call, true);
  }

  // See StreamRecorder.retract_call in streams.py.
  void retract_call(const Call& call) {
    Lock lock(mutex_);
    Stream& stream = *call.stream;
    if (stream.entered != call.seq) {
      stream.mark_incomplete(CALL_RAISED, call.seq);
      records_.add_flags(call.index, RAISED);
      return complete_call(call);
    }
    --stream.entered;
    stream.chain = (stream.chain - call.agreement_hash) * CHAIN_BASE_INVERSE;
    records_.add_flags(call.index, RAISED | RETRACTED);
    records_.record_completion(call.index, read_clock_ns());
    stream.publish_newest();
  }

  // Makes the Work of some calls, the same on every rank, record its time of completion, on the
  // thread that completes it. The callback keeps no tensor alive.
  void time_completion(const Call& call, const WorkPtr& work) {
    if (!is_sampled(call) || !work || call.stream->is_untimed.load(std::memory_order_relaxed))
      return;
    try {
      if (auto future = work->getFuture())
        return future->addCallback(
            [this, index = call.index](c10::ivalue::Future& completed) noexcept {
              if (!completed.hasError())
                record_timed_completion(index);
            });
    } catch (const std::exception&) { // the Works of most backends have no future
    }
    call.stream->is_untimed = true;
  }

  // Publishes the positions of all streams, since their newest records may be overwritten. Returns
  // the number of records that the positions cover.
  uint64_t update_streams() {
    PendingWorks finished;
    Lock lock(mutex_);
    const uint64_t written_count = records_.written_count(), now_ns = read_clock_ns();
    // An index stays valid if other threads open streams while the lock is released.
    for (size_t i = 0; i < streams_.size(); ++i) {
      Stream& stream = *streams_[i];
      if (stream.is_published()) // most of thousands of channels are
        continue;
      if (!stream.pending_works.empty())
        poll_works(stream, now_ns, finished, lock);
      else
        stream.publish_progress(); // see StreamRecorder.update_ring in streams.py
      stream.publish_newest();
    }
    return written_count;
  }

  Stream* open_stream(uint32_t uid, uint64_t first_word, uint64_t loss_word) {
    Lock lock(mutex_);
    uint64_t* const words = reinterpret_cast<uint64_t*>(ring_);
    streams_.push_back(new Stream{uid, words + first_word, words + loss_word});
    if (lost_count_)
      streams_.back()->mark_incomplete(FAULT, 1);
    return streams_.back();
  }

  // Marks a stream as incomplete from call `from_seq` on; 0 means from its next call on.
  void mark_incomplete(Stream& stream, uint64_t reason, uint64_t from_seq) {
    Lock lock(mutex_);
    stream.mark_incomplete(reason, from_seq ? from_seq : stream.entered + 1);
  }

  // Records that a call was lost, and that its stream is not known: all streams are incomplete,
  // including those that are opened later.
  void record_lost_call() {
    Lock lock(mutex_);
    ++lost_count_;
    for (Stream* const stream : streams_)
      stream->mark_incomplete(FAULT, stream->entered + 1);
  }

  // The number of calls that were lost here.
  uint64_t lost_count() {
    Lock lock(mutex_);
    return lost_count_;
  }

  // Records that the completion of a call cannot be found.
  void lose_completion(const Call& call) {
    Lock lock(mutex_);
    call.stream->mark_completion_unknown();
  }

  // The stream is not deleted: another thread may still use it.
  void close_stream(Stream* stream) {
    PendingWorks finished;
    Lock lock(mutex_);
    finished.swap(stream->pending_works);
    streams_.erase(std::remove(streams_.begin(), streams_.end(), stream), streams_.end());
  }

  // Forgets the plans and sites, since the numbers in them are outdated.
  void clear_plans() {
    Lock lock(mutex_);
    plans_.clear_plans();
    sites_.clear_sites();
  }

  void set_code_origin(uint64_t code, uint8_t origin) {
    Lock lock(mutex_);
    sites_.set_code_origin(code, origin);
  }

  void clear_code_origins() {
    Lock lock(mutex_);
    sites_.clear_code_origins();
  }

 private:
  Call enter_call(
      Stream& stream, uint64_t agreement_hash, RecordBody record_body, uint64_t blocked_thread,
      int completion_mode, PendingWorks& finished, Lock& lock) {
    const uint64_t this_thread = get_this_thread();
    const bool is_batched = record_body.flags & BATCHED && batch_began_ns;
    const uint64_t now_ns = is_batched ? batch_began_ns : read_clock_ns();
    if (stream.last_thread != this_thread && detect_concurrency(stream, this_thread, lock))
      record_body.flags |= SHARED;
    if (completion_mode == UNOBSERVABLE)
      stream.mark_completion_unknown();
    drop_finished_works(stream, this_thread, now_ns, finished, lock);
    if (stream.pending_works.empty())
      stream.set_completed(stream.entered);
    stream.last_entered_ns = now_ns;
    stream.chain = stream.chain * CHAIN_BASE + agreement_hash;
    ++stream.entered;
    const uint64_t index = records_.append_record(
        now_ns, stream.entered, stream.chain, stream.completed, record_body);
    return {
        &stream, stream.entered, index, now_ns, blocked_thread, completion_mode, agreement_hash};
  }

  // Drops the works that are finished, or need not be polled, when `this_thread` makes a call.
  void drop_finished_works(
      Stream& stream, uint64_t this_thread, uint64_t now_ns, PendingWorks& finished, Lock& lock) {
    if (stream.pending_works.empty())
      return;
    if (stream.completed == UNKNOWN_COMPLETED || stream.is_newest_blocking(this_thread)) {
      // A blocking call has completed once its thread makes the next one.
      stream.drop_all_works(finished);
    } else if (
        poll_works(stream, now_ns, finished, lock) &&
        stream.pending_works.size() >= MAX_PENDING_WORKS) {
      stream.drop_newest_work(finished);
    }
  }

  void complete_call(const Call& call) {
    records_.record_completion(call.index, read_clock_ns());
    Stream& stream = *call.stream;
    if (stream.has_unfinished_work()) {
      // Asynchronous calls before this one are unfinished: it counts as complete with the last.
      stream.pending_works.push_back({call, Completion::WITH_FORMER, nullptr});
    } else if (stream.completed != UNKNOWN_COMPLETED) {
      stream.pending_works.clear();
      stream.completed = stream.entered;
      stream.publish_progress();
    }
  }

  // Receives an event from a Work, whose mutex is locked.
  void receive_event(const Call& call, WorkEvent event) noexcept {
    const uint64_t now_ns = read_clock_ns();
    Lock lock(mutex_);
    Stream& stream = *call.stream;
    PendingWork* const pending = stream.find_pending_work(call.index);
    if (event == WorkEvent::DESTROYED) {
      // A thread that was blocked in the call is not blocked any more. Any other thread has dropped
      // the Work without a wait, such as that of a message, and the fate of the call is not known.
      if (pending)
        pending->completion = call.blocked_thread ? Completion::COMPLETE : Completion::UNKNOWN;
    } else {
      if (event == WorkEvent::COMPLETED && call.completion_mode == BY_TIMED_REPORTING_WORK &&
          is_sampled(call))
        records_.record_timed_completion(call.index, now_ns);
      else
        records_.record_completion(call.index, now_ns);
      if (pending)
        pending->completion = Completion::COMPLETE;
    }
    while (stream.is_oldest_known_complete()) {
      const PendingWork& oldest = stream.pending_works.front();
      if (oldest.completion == Completion::UNKNOWN)
        records_.record_completion(oldest.call.index, now_ns);
      stream.set_completed(oldest.call.seq);
      stream.pending_works.pop_front(); // this call holds no Work
    }
    stream.publish_progress();
  }

  static bool is_sampled(const Call& call) {
    return compute_sampling_level(call.seq) >= MIN_TIMED_LEVEL;
  }

  void record_timed_completion(uint64_t index) {
    const uint64_t now_ns = read_clock_ns();
    Lock lock(mutex_);
    records_.record_timed_completion(index, now_ns);
  }

  // Moves finished works to `finished`, which is destroyed after the lock is released. True while
  // some call is unfinished.
  bool poll_works(Stream& stream, uint64_t now_ns, PendingWorks& finished, Lock& lock) {
    PendingWorks& works = stream.pending_works;
    if (stream.is_polling)
      return !works.empty();
    stream.is_polling = true;
    while (!works.empty() && is_oldest_complete(stream, lock)) {
      const PendingWork& oldest = works.front();
      if (oldest.completion == Completion::POLLED || oldest.completion == Completion::UNKNOWN)
        records_.record_completion(oldest.call.index, now_ns);
      stream.set_completed(oldest.call.seq);
      stream.drop_oldest_work(finished);
    }
    if (works.size() > 1 && is_newest_complete(stream, lock)) {
      // The Works of some backends never report completion: a later one covers them.
      stream.set_completed(works.back().call.seq);
      stream.drop_all_works(finished);
    }
    stream.is_polling = false;
    stream.publish_progress();
    return !works.empty();
  }

  // The next two functions release the lock while they call torch, and return false if the call was
  // removed meanwhile.

  static bool is_oldest_complete(const Stream& stream, Lock& lock) {
    const PendingWorks& works = stream.pending_works;
    if (works.front().completion != Completion::POLLED)
      return stream.is_oldest_known_complete();
    const uint64_t index = works.front().call.index;
    const bool is_completed = poll_work(works.front().work, lock);
    return is_completed && !works.empty() && works.front().call.index == index;
  }

  static bool is_newest_complete(const Stream& stream, Lock& lock) {
    const PendingWorks& works = stream.pending_works;
    const PendingWork& newest = stream.find_newest_independent();
    if (newest.completion != Completion::POLLED)
      return newest.completion == Completion::COMPLETE;
    const uint64_t index = works.back().call.index;
    const bool is_completed = poll_work(newest.work, lock);
    return is_completed && !works.empty() && works.back().call.index == index;
  }

  static bool poll_work(WorkPtr work, Lock& lock) {
    lock.unlock();
    bool is_completed = false;
    try {
      is_completed = work->isCompleted();
    } catch (const std::exception& error) {
      record_fault(error.what());
    } catch (...) {
      record_fault("isCompleted");
    }
    work.reset();
    lock.lock();
    return is_completed;
  }

  // See StreamRecorder._detect_concurrency in streams.py.
  static bool detect_concurrency(Stream& stream, uint64_t this_thread, Lock& lock) {
    const uint64_t former_thread = stream.last_thread;
    const bool is_newest_blocking = stream.is_newest_blocking(former_thread);
    stream.last_thread = this_thread;
    if (!former_thread || !is_python_running())
      return false;
    lock.unlock();
    const ThreadActivity former = inspect_thread(former_thread);
    lock.lock();
    const bool is_inside_call = former.is_in_torch && is_newest_blocking;
    const bool is_concurrent = is_inside_call || (former.is_independent && stream.was_independent);
    stream.was_independent = former.is_independent;
    return is_concurrent;
  }

  std::mutex mutex_;
  char* ring_;
  RecordTable records_;
  PlanCache plans_;
  CallSites sites_;
  std::vector<Stream*> streams_;
  uint64_t lost_count_ = 0;
};

} // namespace
