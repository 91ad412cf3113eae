// The hash of the keys of the recorder's caches.

#pragma once

#include "python_frames.h"
#include "ring_format.h"

#include <cstddef>
#include <vector>

namespace {

using CallKey = std::vector<int64_t>; // everything that distinguishes one kind of call from others

struct CacheHash {
  static uint64_t mix(uint64_t hash, uint64_t word) {
    return (hash ^ word ^ (hash >> 29)) * CHAIN_BASE;
  }
  size_t operator()(const CallKey& key) const {
    uint64_t hash = key.size();
    for (int64_t word : key)
      hash = mix(hash, static_cast<uint64_t>(word));
    return hash ^ (hash >> 32);
  }
  size_t operator()(const CodePosition& position) const {
    const uint64_t hash = mix(position.code, position.instruction);
    return hash ^ (hash >> 32);
  }
};

} // namespace
