// Writes the record table of the ring. A reader detects a record that was read while it was
// written: both copies of its stamp must be equal. The caller holds the recorder's mutex.

#pragma once

#include "ring_format.h"

#include <time.h>

namespace {

uint64_t read_clock_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

class RecordTable {
 public:
  RecordTable(char* first_slot, uint64_t slots)
      : records_(reinterpret_cast<Record*>(first_slot)), slots_(slots) {}

  uint64_t written_count() const { return written_; }

  // Returns the index of the new record.
  uint64_t append_record(
      uint64_t entered_ns, uint64_t seq, uint64_t chain, uint64_t completed,
      const RecordBody& body) {
    const uint64_t index = written_++;
    Record& r = get_slot(index);
    __atomic_store_n(&r.stamp_low, 0, __ATOMIC_RELAXED); // readers discard the record from here on
    __atomic_store_n(&r.stamp, index + 1, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    r.entered_ns = entered_ns;
    r.done_ns = 0;
    r.seq = seq;
    r.chain = chain;
    r.completed = completed;
    r.body = body;
    __atomic_store_n(&r.stamp_low, static_cast<uint32_t>(index + 1), __ATOMIC_RELEASE);
    return index;
  }

  // The next three functions do nothing if the record has been overwritten.

  void add_flags(uint64_t index, uint32_t flags) {
    if (Record& r = get_slot(index); r.stamp == index + 1)
      r.body.flags |= flags;
  }

  void record_completion(uint64_t index, uint64_t now_ns) {
    if (Record& r = get_slot(index); r.stamp == index + 1 && !(r.body.flags & TIMED))
      r.done_ns = now_ns;
  }

  // Records the exact time, which a later `record_completion` does not overwrite.
  void record_timed_completion(uint64_t index, uint64_t now_ns) {
    if (Record& r = get_slot(index); r.stamp == index + 1) {
      r.done_ns = now_ns;
      r.body.flags |= TIMED;
    }
  }

 private:
  Record& get_slot(uint64_t index) { return records_[index % slots_]; }

  Record* records_;
  uint64_t slots_, written_ = 0;
};

} // namespace
