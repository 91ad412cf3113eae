// The binary format of the ring, as hangwatch/ring/layout.py defines it, and the sampling of calls,
// as hangwatch/ring/sampling.py defines it.

#pragma once

#include <cstddef>
#include <cstdint>

namespace {

constexpr uint64_t UNKNOWN_COMPLETED = ~0ull;
constexpr uint64_t CHAIN_BASE = 0x9E3779B97F4A7C15; // the base of the running hash
constexpr uint64_t CHAIN_BASE_INVERSE = 0xF1DE83E19937733D;
static_assert(CHAIN_BASE * CHAIN_BASE_INVERSE == 1);
constexpr int MIN_TIMED_LEVEL = 6; // one call in 64 is timed

constexpr int LOSS_SEQ_BITS = 56;

enum LossReason : uint64_t { FAULT = 1, CALL_RAISED = 2 }; // hangwatch/model/calls.py has more

enum RecordFlag : uint32_t { RAISED = 4, SHARED = 8, TIMED = 16, RETRACTED = 32, BATCHED = 64 };

enum StreamWord { // the words of a slot in the stream table that the recorder updates
  COMPLETED_WORD,
  PENDING_NS_WORD,
  SEQ_WORD,
  CHAIN_WORD,
  ENTERED_NS_WORD
};

#pragma pack(push, 4)
struct RecordBody { // the part of a record that Python packs with RECORD_BODY_STRUCT
  uint64_t bytes = 0;
  uint32_t uid = 0, signature = 0, site = 0, thread = 0, flags = 0;
  int32_t peer = -1, tag = 0;
};

struct Record {
  uint64_t stamp, entered_ns, done_ns, seq, chain, completed;
  RecordBody body;
  uint32_t stamp_low;
};
#pragma pack(pop)
static_assert(sizeof(RecordBody) == 36 && sizeof(Record) == 88, "as in hangwatch/ring/layout.py");

int compute_sampling_level(uint64_t seq) {
  const uint64_t hash = seq * CHAIN_BASE;
  return hash ? __builtin_clzll(hash) : 64;
}

} // namespace
