// The state of a stream of calls on this rank: its position, its running hash, and its unfinished
// calls. agent/recorder/streams.py is the same in Python.

#pragma once

#include "failures.h"
#include "ring_format.h"
#include "work_reports.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <deque>

namespace {

// How the completion of a call is detected: `CompletionMode` in streams.py.
enum CompletionMode : int {
  BY_WORK = 0,
  AT_NEXT_CALL = 1,
  AT_RETURN = 2,
  UNOBSERVABLE = 3,
  BY_TIMED_WORK = 4,
  BY_REPORTING_WORK = 5,
  BY_TIMED_REPORTING_WORK = 6
};

bool has_reporting_work(int completion_mode) {
  return completion_mode == BY_REPORTING_WORK || completion_mode == BY_TIMED_REPORTING_WORK;
}

constexpr size_t MAX_PENDING_WORKS = 16; // the limit of each stream

struct Stream;

struct Call { // a call in progress; it is recorded if it has a stream
  Stream* stream = nullptr;
  uint64_t seq = 0, index = 0, entered_ns = 0;
  uint64_t blocked_thread = 0; // the thread that waits in it; 0 if none does
  int completion_mode = UNOBSERVABLE;
  uint64_t agreement_hash = 0;
  int failure_rule = NO_RULE;
};

// The knowledge about the completion of a call that has returned.
enum class Completion {
  POLLED, // the Work is polled; only this state holds the Work, and with it the tensors
  TO_BE_REPORTED, // the Work will report it
  UNKNOWN, // nothing shows it: the call is complete once another one is made
  WITH_FORMER, // the call is complete when the calls before it are
  COMPLETE
};

struct PendingWork {
  Call call;
  Completion completion;
  WorkPtr work; // null unless it is polled
};
using PendingWorks = std::deque<PendingWork>;

struct Stream {
  uint32_t uid;
  uint64_t* slot; // the words in the ring's stream table, indexed by StreamWord
  uint64_t* loss; // the word in the ring's loss table
  uint64_t entered = 0, completed = 0, chain = 0, last_entered_ns = 0;
  uint64_t published_entered = 0, published_completed = 0; // the position at the last poll
  uint64_t last_thread = 0; // the thread that made the last call
  // Whether the former thread continued with work of its own at the last change of threads.
  bool was_independent = false;
  bool is_polling = false; // a thread is polling the Works
  std::atomic<bool> is_untimed{false}; // the Works do not report the time of completion
  PendingWorks pending_works; // oldest first

  void set_completed(uint64_t seq) {
    if (completed != UNKNOWN_COMPLETED)
      completed = seq;
  }

  void mark_completion_unknown() {
    completed = UNKNOWN_COMPLETED;
    publish_progress();
  }

  // Records that the numbers and running hashes of this stream's calls are not certain from call
  // `from_seq` on. An earlier loss is kept. Must come before the next call is recorded.
  void mark_incomplete(uint64_t reason, uint64_t from_seq) {
    const uint64_t known_seq = *loss & ((1ull << LOSS_SEQ_BITS) - 1);
    if (!known_seq || from_seq < known_seq)
      __atomic_store_n(loss, from_seq | reason << LOSS_SEQ_BITS, __ATOMIC_RELEASE);
  }

  // The next three functions move Works to `finished`, which the caller destroys after it released
  // the mutex.

  void drop_newest_work(PendingWorks& finished) {
    finished.push_back(std::move(pending_works.back()));
    pending_works.pop_back();
  }

  void drop_oldest_work(PendingWorks& finished) {
    finished.push_back(std::move(pending_works.front()));
    pending_works.pop_front();
  }

  void drop_all_works(PendingWorks& finished) {
    while (!pending_works.empty())
      drop_oldest_work(finished);
  }

  bool has_unfinished_work() const {
    for (const PendingWork& pending : pending_works)
      if (pending.completion == Completion::POLLED ||
          pending.completion == Completion::TO_BE_REPORTED)
        return true;
    return false;
  }

  // Whether the oldest call is known to be complete without a poll; false if there is none.
  bool is_oldest_known_complete() const {
    if (pending_works.empty())
      return false;
    switch (pending_works.front().completion) {
      case Completion::COMPLETE:
      case Completion::WITH_FORMER:
        return true;
      case Completion::UNKNOWN:
        return pending_works.size() > 1;
      default:
        return false;
    }
  }

  // The newest call whose completion does not depend on the calls before it. There must be a call.
  const PendingWork& find_newest_independent() const {
    auto pending = pending_works.rbegin();
    while (pending->completion == Completion::WITH_FORMER && pending + 1 != pending_works.rend())
      ++pending;
    return *pending;
  }

  PendingWork* find_pending_work(uint64_t index) {
    for (PendingWork& pending : pending_works)
      if (pending.call.index == index)
        return &pending;
    return nullptr;
  }

  bool is_newest_blocking(uint64_t thread) const {
    return !pending_works.empty() && pending_works.back().call.blocked_thread == thread;
  }

  bool is_published() const {
    return pending_works.empty() && entered == published_entered &&
           completed == published_completed;
  }

  void publish_progress() {
    slot[COMPLETED_WORD] = completed;
    slot[PENDING_NS_WORD] = pending_works.empty() ? 0 : pending_works.front().call.entered_ns;
  }

  void publish_newest() {
    slot[SEQ_WORD] = entered;
    slot[CHAIN_WORD] = chain;
    slot[ENTERED_NS_WORD] = last_entered_ns;
    published_entered = entered;
    published_completed = completed;
  }
};

} // namespace
