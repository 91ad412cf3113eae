// The user's line behind a call. Python finds it the first time (`CallSites.find_site` in
// agent/recorder/callers.py); after that, this code finds it without the GIL.

#pragma once

#include "hashing.h"
#include "python_calls.h"
#include "python_frames.h"

#include <mutex>
#include <unordered_map>

namespace {

using Lock = std::unique_lock<std::mutex>;

enum CodeOrigin : uint8_t { USER = 0, LIBRARY = 1, MACHINERY = 2 }; // the origins in callers.py

// All methods require the recorder's mutex.
class CallSites {
 public:
  // The number of the site of the call that this thread makes; 0 if unknown. Releases `lock` while
  // it calls Python.
  uint32_t find_site(Lock& lock) {
    const int64_t cached = find_cached_site();
    if (cached != NOT_CACHED)
      return static_cast<uint32_t>(cached);
    if (!is_python_running())
      return 0;
    const uint64_t generation = generation_;
    lock.unlock();
    const uint32_t site = find_site_in_python();
    lock.lock();
    if (generation == generation_)
      cache_site(site);
    return site;
  }

  void set_code_origin(uint64_t code, uint8_t origin) { origins_[code] = origin; }

  void clear_sites() {
    ++generation_;
    sites_.clear();
  }

  void clear_code_origins() {
    clear_sites();
    origins_.clear();
  }

 private:
  static constexpr int64_t NOT_CACHED = -1;

  int64_t find_cached_site() const {
    int64_t site = 0;
    bool has_library_frame = false; // whether one was visited
    walk_frames([&](CodePosition position) {
      const auto origin = origins_.find(position.code);
      if (origin == origins_.end()) {
        site = NOT_CACHED;
        return false;
      }
      const bool is_library = origin->second == LIBRARY;
      if (origin->second == MACHINERY || (is_library && has_library_frame))
        return true;
      const auto cached = sites_.find(position);
      site = cached == sites_.end() ? NOT_CACHED : int64_t{cached->second};
      has_library_frame = true;
      return is_library;
    });
    return site;
  }

  // Caches the site that Python found. It belongs to the innermost frame of user code, else to the
  // innermost frame of a library.
  void cache_site(uint32_t site) {
    CodePosition library_frame{};
    bool has_user_frame = false;
    walk_frames([&](CodePosition position) {
      // Python does not show some frames, such as that of an entry from C: they are machinery.
      const auto origin = origins_.emplace(position.code, MACHINERY).first;
      if (origin->second == LIBRARY && !library_frame.code)
        library_frame = position;
      if (origin->second != USER)
        return true;
      if (site)
        sites_[position] = site;
      has_user_frame = true;
      return false;
    });
    if (!has_user_frame && site && library_frame.code)
      sites_[library_frame] = site;
  }

  uint64_t generation_ = 0; // counts how often the cached sites became outdated
  std::unordered_map<uint64_t, uint8_t> origins_; // the key is a code object
  std::unordered_map<CodePosition, uint32_t, CacheHash> sites_;
};

} // namespace
