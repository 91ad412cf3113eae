// The common details of all calls of a kind (operator, group, shapes, peer, ...), from the first
// call of that kind, which Python interprets.

#pragma once

#include "hashing.h"
#include "python_frames.h"
#include "streams.h"

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <unordered_map>

namespace {

constexpr size_t MAX_PLANS = 4096;
constexpr size_t MAX_COMPARED_TENSORS = 64; // half of them are at either end of a longer list
constexpr int MAX_COMPARED_CALLERS = 5; // torch's functions, their wrappers and the user's function

struct CallPlan {
  Stream* stream = nullptr; // null if these calls are not recorded
  uint64_t agreement_hash = 0;
  RecordBody record_body;
  bool is_blocking = false;
  int completion_mode = UNOBSERVABLE;
  int failure_rule = NO_RULE;
};

// A call that Python records often, of which all but the thread and the site is known: `_PlannedCall`
// in library.py.
struct PlannedCall {
  Stream* stream;
  uint64_t agreement_hash;
  RecordBody record_body;
  uint64_t seq; // its number, once it was entered
};
static_assert(sizeof(PlannedCall) == 64, "as in library.py");

// All methods require the recorder's mutex.
class PlanCache {
 public:
  const CallPlan* find_plan(const CallKey& key) const {
    const auto entry = plans_.find(key);
    return entry == plans_.end() ? nullptr : &entry->second;
  }

  uint64_t generation() const { return generation_; }

  // Adds a plan that was made in `generation`, unless it may be outdated by now.
  void add_plan(const CallKey& key, const CallPlan& plan, uint64_t generation) {
    if (generation != generation_)
      return;
    if (plans_.size() >= MAX_PLANS)
      plans_.clear();
    plans_.emplace(key, plan);
  }

  void clear_plans() {
    ++generation_;
    plans_.clear();
  }

 private:
  uint64_t generation_ = 0; // counts how often the plans became outdated
  std::unordered_map<CallKey, CallPlan, CacheHash> plans_;
};

c10::intrusive_ptr<torch::CustomClassHolder> unbox(const c10::IValue& value) {
  return value.isObject() ? value.toObjectRef().getSlot(0).toCapsule() : nullptr;
}

void append_tensor(const at::Tensor& tensor, CallKey& key) {
  if (!tensor.defined())
    return key.push_back(-1);
  const auto sizes = tensor.sizes();
  const auto dimensions = static_cast<int64_t>(sizes.size());
  const auto device = static_cast<int64_t>(tensor.device().type());
  key.push_back(dimensions << 16 | device << 8 | static_cast<int64_t>(tensor.scalar_type()));
  key.insert(key.end(), sizes.begin(), sizes.end());
}

// Appends the functions that make a call. They decide whether a message is left pending or part of a
// batch: `isend` and `send` call the same operator (`find_message_flag` in callers.py).
void append_callers(CallKey& key) {
  int count = 0;
  walk_frames([&](CodePosition position) {
    key.push_back(static_cast<int64_t>(position.code));
    return ++count < MAX_COMPARED_CALLERS;
  });
}

// Appends the characters, so that no two names have the same key.
void append_name(const std::string& name, CallKey& key) {
  key.push_back(static_cast<int64_t>(name.size()));
  for (size_t i = 0; i < name.size(); i += sizeof(int64_t)) {
    int64_t word = 0;
    memcpy(&word, name.data() + i, std::min(name.size() - i, sizeof word));
    key.push_back(word);
  }
}

// Appends everything but the data of an argument to the key of its call. If a list has more than
// `max_tensors` tensors, only those at either end are appended.
void append_argument(
    const c10::IValue& value, bool is_reduce_op, size_t max_tensors, CallKey& key) {
  if (value.isTensor()) {
    append_tensor(value.toTensor(), key);
  } else if (value.isList()) {
    const auto items = value.toListRef();
    key.push_back(static_cast<int64_t>(items.size()));
    const bool has_all = items.size() <= max_tensors || items[0].isInt();
    for (size_t i = 0; i < items.size(); ++i)
      if (has_all || i < max_tensors / 2 || i >= items.size() - max_tensors / 2)
        append_argument(items[i], false, max_tensors, key);
  } else if (value.isInt()) {
    key.push_back(value.toInt());
  } else if (value.isBool()) {
    key.push_back(value.toBool());
  } else if (value.isString()) {
    append_name(value.toStringRef(), key);
  } else if (value.isObject()) {
    const auto object = unbox(value);
    if (is_reduce_op)
      key.push_back(static_cast<c10d::ReduceOp*>(object.get())->op_);
    else
      key.push_back(reinterpret_cast<int64_t>(object.get()));
  } else {
    key.push_back(INT64_MIN + value.isNone());
  }
}

} // namespace
