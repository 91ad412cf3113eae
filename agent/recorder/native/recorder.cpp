// The native recorder's kernels. They write the ring that hangwatch/ring/layout.py documents, as agent/recorder/{kernels,call_reader,
// streams}.py do, without the GIL.
//
// Python interprets each kind of call (operator, group, shapes, peer, ...) once: the first call of a kind gets a plan from Python, by
// calling an operator `hangwatch::NAME` with the same arguments; further calls look the plan up. So both recorders write the same
// hashes and names. Python also finds the user's line of a call (`hangwatch::_site`) and, when another thread than before makes a
// call, inspects the former thread (`hangwatch::_inspect_thread`). Everything else happens here, under one mutex. It is held for some
// 100 ns, and never while waiting for the GIL, for torch, or for a destructor of torch's.
//
// This file needs torch's headers, not Python's: its interface to Python, at the end, is in C and called through ctypes.

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>

#include <cxxabi.h>
#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <vector>

extern "C" { // Python functions that may be called without the GIL
int Py_IsInitialized(void);
__attribute__((weak)) int Py_IsFinalizing(void); // since Python 3.13
__attribute__((weak)) int _Py_IsFinalizing(void); // before
char* PyGILState_GetThisThreadState(void);
}

namespace {

using torch::jit::Stack;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// ====== definitions as in hangwatch/ring/layout.py and agent/recorder/streams.py ==============================================

constexpr uint64_t UNKNOWN = ~0ull;
constexpr uint64_t BASE = 0x9E3779B97F4A7C15; // of the running hash
enum Flag : uint32_t { BLOCKING = 1, ASYNC = 2, RAISED = 4, SHARED = 8, TIMED_FLAG = 16 };
enum CompletionMode : int { WORK = 0, NEXT = 1, RETURN = 2, UNOBSERVABLE = 3, TIMED = 4 };
enum Verdict : uint8_t { USER = 0, LIBRARY = 1, MACHINERY = 2 };
constexpr int MIN_TIMED_LEVEL = 6; // hangwatch/ring/sampling.py: one call in 64
constexpr size_t MAX_PENDING_WORKS = 16; // kept in a stream
constexpr size_t MAX_PLANS = 4096;
constexpr size_t MAX_COMPARED = 64; // tensors of a longer list, half of them at either end

#pragma pack(push, 4)
struct RecordBody { // the part of a record that Python packs with RECORD_BODY_STRUCT
  uint64_t bytes = 0;
  uint32_t uid = 0, signature = 0, site = 0, thread = 0, flags = 0;
  int32_t peer = -1, tag = 0;
};
struct Record {
  uint64_t stamp, entered_ns, done_ns, seq, chain, completed;
  RecordBody body;
  uint32_t low;
};
#pragma pack(pop)
static_assert(sizeof(RecordBody) == 36 && sizeof(Record) == 88, "as in hangwatch/ring/layout.py");

struct Stream;

struct Call { // a call in progress; it is recorded if it has a stream
  Stream* stream = nullptr;
  uint64_t seq = 0, index = 0, entered_ns = 0;
  uint64_t blocked = 0; // the thread that it blocks
  int mode = UNOBSERVABLE;
};

struct Unfinished {
  Call call;
  WorkPtr work; // null: it never reports completion
};
using Works = std::deque<Unfinished>;

struct Stream {
  uint32_t uid;
  uint64_t* words; // its slot in the ring
  uint64_t entered = 0, completed = 0, chain = 0, entered_ns = 0;
  uint64_t thread = 0; // the thread that made the last call
  bool was_independent = false; // at the last change of threads, the former one continued with work of its own
  bool is_polling = false; // some thread is polling its Works
  std::atomic<bool> untimed{false}; // its Works do not report the time of completion
  Works works;

  void set_completed(uint64_t seq) {
    if (completed != UNKNOWN)
      completed = seq;
  }
  void write_progress() {
    words[0] = completed;
    words[1] = works.empty() ? 0 : works.front().call.entered_ns;
  }
};

struct Plan { // what all calls of a kind have in common
  Stream* stream = nullptr; // null: they are not recorded
  uint64_t agree = 0;
  RecordBody body;
  bool blocks = false;
  int mode = UNOBSERVABLE;
};

// ====== calls to Python, and its frames ===================================================================================================

struct Layout { // byte offsets in the interpreter's structs; frames.py knows them
  int32_t indirect; // in a thread state: a pointer to what holds the newest frame; -1: itself does
  int32_t newest; // in that: the newest frame
  int32_t back, code, instruction; // in a frame
};

Layout layout;
std::atomic<uint64_t> faults{0};
char last_fault[200];

void fault(const char* what) noexcept {
  strncpy(last_fault, what, sizeof last_fault - 1);
  ++faults;
}

// A thread that requests the GIL while the interpreter exits is terminated or waits forever.
bool is_python_running() {
  return Py_IsInitialized() && !(Py_IsFinalizing ? Py_IsFinalizing() : _Py_IsFinalizing());
}

struct PythonError { // an exception that must be passed on
  std::exception_ptr error;
};

// Calls one of our operators in Python, under the GIL. These swallow their own exceptions: an exception of Python's that arrives all the
// same is from a signal handler, such as KeyboardInterrupt.
c10::IValue call_python(const c10::OperatorHandle& op, Stack stack) {
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::BackendSelect), &stack);
  } catch (const std::exception& error) {
    const char* kind = typeid(error).name(); // the headers, torch/csrc/Exceptions.h and pybind11's, need Python's
    if (strstr(kind, "python_error") || strstr(kind, "error_already_set"))
      throw PythonError{std::current_exception()};
    throw;
  }
  return stack.back();
}

c10::OperatorHandle find_operator(const std::string& name) { // such as "c10d::send" or "c10d::put.out"
  const size_t dot = name.find('.');
  const std::string overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.substr(0, dot).c_str(), overload.c_str());
}

uint32_t find_site() { // the number of the site of the call that this thread makes
  static const c10::OperatorHandle op = find_operator("hangwatch::_site");
  return static_cast<uint32_t>(call_python(op, {}).toInt());
}

uint32_t inspect_thread(uint64_t thread) { // bit 0: it is in torch.distributed; bit 1: in code of its own
  static const c10::OperatorHandle op = find_operator("hangwatch::_inspect_thread");
  return static_cast<uint32_t>(call_python(op, {static_cast<int64_t>(thread)}).toInt());
}

template <class T>
T at(const char* base, int32_t offset) {
  T value;
  memcpy(&value, base + offset, sizeof value);
  return value;
}

struct Place { // an instruction of a code object, both kept alive by Python
  uint64_t code;
  uint32_t instruction; // the low half of its address or number: enough within one code object
  bool operator==(const Place& other) const { return code == other.code && instruction == other.instruction; }
};

// Visits the frames of the calling thread, newest first. They do not change while the thread is in this function, so no lock is needed.
template <class Visit> // bool(Place): false stops
void walk_frames(Visit visit) {
  const char* thread = PyGILState_GetThisThreadState();
  if (!thread)
    return;
  const char* holder = layout.indirect < 0 ? thread : at<const char*>(thread, layout.indirect);
  for (const char* frame = holder ? at<const char*>(holder, layout.newest) : nullptr; frame; frame = at<const char*>(frame, layout.back))
    if (!visit(Place{at<uint64_t>(frame, layout.code), at<uint32_t>(frame, layout.instruction)}))
      return;
}

// ====== the recorder of one ring ========================================================================================

using Key = std::vector<int64_t>;

struct Hash {
  static uint64_t mix(uint64_t h, uint64_t word) { return (h ^ word ^ (h >> 29)) * BASE; }
  size_t operator()(const Key& key) const {
    uint64_t h = key.size();
    for (int64_t word : key)
      h = mix(h, static_cast<uint64_t>(word));
    return h ^ (h >> 32);
  }
  size_t operator()(const Place& place) const {
    uint64_t h = mix(place.code, place.instruction);
    return h ^ (h >> 32);
  }
};

int sampling_level(uint64_t seq) { // as in hangwatch/ring/sampling.py
  const uint64_t hash = seq * BASE;
  return hash ? __builtin_clzll(hash) : 64;
}

uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

using Lock = std::unique_lock<std::mutex>;

class Recorder {
 public:
  Recorder(char* ring, uint64_t records_at, uint64_t records)
      : ring_(ring), records_(reinterpret_cast<Record*>(ring + records_at)), count_(records) {}

  // Records a call. Without a plan for its kind, `fetch` makes one, and returns whether to keep it.
  template <class Fetch>
  Call record_call(const Key& key, Fetch fetch) {
    Works finished;
    Lock lock(mutex_);
    Plan plan;
    if (auto found = plans_.find(key); found != plans_.end()) {
      plan = found->second;
    } else {
      const Key own_key = key; // without the lock, the caller's key may be reused for another call
      const uint64_t generation = generation_;
      lock.unlock();
      const bool keep = fetch(plan);
      lock.lock();
      if (keep && generation == generation_) { // else the plan may be outdated
        if (plans_.size() >= MAX_PLANS)
          plans_.clear();
        plans_.emplace(own_key, plan);
      }
    }
    if (!plan.stream)
      return {};
    plan.body.site = site(lock);
    const uint64_t this_thread = static_cast<uint64_t>(pthread_self());
    plan.body.thread = static_cast<uint32_t>(this_thread);
    return enter(*plan.stream, plan.agree, plan.body, plan.blocks ? this_thread : 0, plan.mode, finished, lock);
  }

  Call enter(Stream& s, uint64_t agree, const RecordBody& body, uint64_t blocked, int mode) {
    Works finished;
    Lock lock(mutex_);
    return enter(s, agree, body, blocked, mode, finished, lock);
  }

  void leave(const Call& call, WorkPtr work) {
    Lock lock(mutex_);
    if (call.mode == RETURN)
      finish(call);
    else if (call.mode != UNOBSERVABLE && call.stream->completed != UNKNOWN)
      call.stream->works.push_back({call, std::move(work)});
  }

  // Makes the Work of some calls, the same on every rank, record its time of completion, on the thread that completes it. The callback
  // keeps no tensor alive.
  void time(const Call& call, const WorkPtr& work) {
    if (sampling_level(call.seq) < MIN_TIMED_LEVEL || !work || call.stream->untimed.load(std::memory_order_relaxed))
      return;
    try {
      if (auto future = work->getFuture())
        return future->addCallback([this, index = call.index](c10::ivalue::Future& completed) noexcept {
          if (!completed.hasError())
            record_timed_completion(index, now_ns());
        });
    } catch (const std::exception&) { // the Works of most backends have no future
    }
    call.stream->untimed = true;
  }

  void finish(const Call& call, bool raised) {
    Lock lock(mutex_);
    if (Record& r = slot(call.index); raised && r.stamp == call.index + 1)
      r.body.flags |= RAISED;
    finish(call);
  }

  // Publishes the positions of all streams, since their newest records may be overwritten. Returns the number of records that the
  // positions cover.
  uint64_t update_streams() {
    Works finished;
    Lock lock(mutex_);
    const uint64_t written = written_, now = now_ns();
    for (size_t i = 0; i < streams_.size(); ++i) { // by index: while the lock is released, other threads may open streams
      Stream& s = *streams_[i];
      if (!s.works.empty())
        poll(s, now, finished, lock);
      else
        s.write_progress(); // see StreamRecorder.update_ring in streams.py
      s.words[2] = s.entered;
      s.words[3] = s.chain;
      s.words[4] = s.entered_ns;
    }
    return written;
  }

  Stream* open(uint32_t uid, uint64_t first_word) {
    Lock lock(mutex_);
    streams_.push_back(new Stream{uid, reinterpret_cast<uint64_t*>(ring_) + first_word});
    return streams_.back();
  }

  // The stream is not deleted: another thread may still use it.
  void close(Stream* s) {
    Works finished;
    Lock lock(mutex_);
    finished.swap(s->works);
    streams_.erase(std::remove(streams_.begin(), streams_.end(), s), streams_.end());
  }

  void forget_plans() {
    Lock lock(mutex_);
    ++generation_;
    plans_.clear();
    places_.clear();
  }

  void judge(uint64_t code, uint8_t verdict) {
    Lock lock(mutex_);
    codes_[code] = verdict;
  }

  void forget_codes() {
    Lock lock(mutex_);
    ++generation_;
    codes_.clear();
    places_.clear();
  }

 private:
  Record& slot(uint64_t index) { return records_[index % count_]; }

  Call enter(Stream& s, uint64_t agree, RecordBody body, uint64_t blocked, int mode, Works& finished, Lock& lock) {
    const uint64_t this_thread = static_cast<uint64_t>(pthread_self()), now = now_ns();
    if (s.thread != this_thread && detect_concurrency(s, this_thread, lock))
      body.flags |= SHARED;
    if (mode == UNOBSERVABLE) {
      s.completed = UNKNOWN;
      s.write_progress();
    }
    if (s.completed == UNKNOWN || (!s.works.empty() && s.works.back().call.blocked == this_thread))
      while (!s.works.empty()) { // a blocking call has completed once its thread makes the next one
        finished.push_back(std::move(s.works.back()));
        s.works.pop_back();
      }
    else if (!s.works.empty() && poll(s, now, finished, lock) && s.works.size() >= MAX_PENDING_WORKS) {
      finished.push_back(std::move(s.works.back()));
      s.works.pop_back();
    }
    if (s.works.empty())
      s.set_completed(s.entered);
    s.entered_ns = now;
    s.chain = s.chain * BASE + agree;
    const Call call{&s, ++s.entered, written_++, now, blocked, mode};
    Record& r = slot(call.index);
    __atomic_store_n(&r.low, 0, __ATOMIC_RELAXED); // from here on, readers discard it as incomplete
    __atomic_store_n(&r.stamp, call.index + 1, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    r.entered_ns = now;
    r.done_ns = 0;
    r.seq = call.seq;
    r.chain = s.chain;
    r.completed = s.completed;
    r.body = body;
    __atomic_store_n(&r.low, static_cast<uint32_t>(call.index + 1), __ATOMIC_RELEASE);
    return call;
  }

  void finish(const Call& call) {
    record_completion(call.index, now_ns());
    Stream& s = *call.stream;
    auto last = std::find_if(s.works.rbegin(), s.works.rend(), [](const Unfinished& u) { return bool(u.work); });
    if (last != s.works.rend()) { // asynchronous calls before it are unfinished: it counts as complete with the last one
      WorkPtr work = last->work;
      s.works.push_back({call, std::move(work)});
    } else if (s.completed != UNKNOWN) {
      s.works.clear();
      s.completed = s.entered;
      s.write_progress();
    }
  }

  void record_completion(uint64_t index, uint64_t now) {
    if (Record& r = slot(index); r.stamp == index + 1 && !(r.body.flags & TIMED_FLAG))
      r.done_ns = now;
  }

  void record_timed_completion(uint64_t index, uint64_t now) {
    Lock lock(mutex_);
    if (Record& r = slot(index); r.stamp == index + 1) {
      r.done_ns = now;
      r.body.flags |= TIMED_FLAG;
    }
  }

  // Moves finished works to `finished`, which is destroyed after the lock is released. True while some call is unfinished.
  bool poll(Stream& s, uint64_t now, Works& finished, Lock& lock) {
    if (s.is_polling)
      return !s.works.empty();
    s.is_polling = true;
    auto is_complete = [&](const Unfinished& oldest_or_newest) { // false also if it was removed in between
      const uint64_t index = oldest_or_newest.call.index;
      const bool front = &oldest_or_newest == &s.works.front();
      WorkPtr work = oldest_or_newest.work;
      lock.unlock();
      bool is_completed = false;
      try {
        is_completed = work->isCompleted();
      } catch (const std::exception& error) {
        fault(error.what());
      } catch (...) {
        fault("isCompleted");
      }
      work.reset();
      lock.lock();
      return is_completed && !s.works.empty() && (front ? s.works.front() : s.works.back()).call.index == index;
    };
    while (!s.works.empty()) {
      if (!(s.works.front().work ? is_complete(s.works.front()) : s.works.size() > 1))
        break;
      record_completion(s.works.front().call.index, now);
      s.set_completed(s.works.front().call.seq);
      finished.push_back(std::move(s.works.front()));
      s.works.pop_front();
    }
    if (s.works.size() > 1 && s.works.back().work && is_complete(s.works.back())) {
      s.set_completed(s.works.back().call.seq); // the works of some backends never report completion: a later one covers them
      while (!s.works.empty()) {
        finished.push_back(std::move(s.works.front()));
        s.works.pop_front();
      }
    }
    s.is_polling = false;
    s.write_progress();
    return !s.works.empty();
  }

  // See StreamRecorder._detect_concurrency in streams.py.
  bool detect_concurrency(Stream& s, uint64_t this_thread, Lock& lock) {
    const uint64_t former = s.thread;
    const bool is_inside_call = !s.works.empty() && s.works.back().call.blocked == former;
    s.thread = this_thread;
    if (!former || !is_python_running())
      return false;
    lock.unlock();
    const uint32_t bits = inspect_thread(former);
    lock.lock();
    const bool is_concurrent = ((bits & 1) && is_inside_call) || ((bits & 2) && s.was_independent);
    s.was_independent = bits & 2;
    return is_concurrent;
  }

  // The number of the call's site, from earlier results of CallSites.find_site in callsite.py.
  uint32_t site(Lock& lock) {
    int64_t found = 0;
    bool has_library = false; // a frame of library code was visited
    walk_frames([&](Place place) {
      auto code = codes_.find(place.code);
      if (code == codes_.end()) {
        found = -1;
        return false;
      }
      if (code->second == MACHINERY || (code->second == LIBRARY && has_library))
        return true;
      auto known = places_.find(place);
      found = known == places_.end() ? -1 : int64_t{known->second};
      has_library = true;
      return code->second == LIBRARY;
    });
    if (found >= 0 || !is_python_running())
      return found > 0 ? static_cast<uint32_t>(found) : 0;
    const uint64_t generation = generation_;
    lock.unlock();
    const uint32_t number = find_site();
    lock.lock();
    if (generation == generation_) {
      Place library{};
      bool user = false;
      walk_frames([&](Place place) {
        auto code = codes_.emplace(place.code, MACHINERY).first; // frames that Python does not show, as on entry from C
        if (code->second == LIBRARY && !library.code)
          library = place;
        if (code->second != USER)
          return true;
        if (number)
          places_[place] = number;
        user = true;
        return false;
      });
      if (!user && number && library.code)
        places_[library] = number;
    }
    return number;
  }

  char* ring_;
  Record* records_;
  uint64_t count_, written_ = 0;
  std::mutex mutex_;
  uint64_t generation_ = 0; // counts the times that cached results became outdated
  std::unordered_map<Key, Plan, Hash> plans_;
  std::unordered_map<uint64_t, uint8_t> codes_;
  std::unordered_map<Place, uint32_t, Hash> places_;
  std::vector<Stream*> streams_;
};

// The recorder that all kernels use, or null. Earlier ones are never freed: a thread may still be in one, and after a fork its mutex may
// stay locked.
std::atomic<Recorder*> current{nullptr};

// ====== kernels =========================================================================================================

c10::intrusive_ptr<torch::CustomClassHolder> unbox(const c10::IValue& value) {
  return value.isObject() ? value.toObjectRef().getSlot(0).toCapsule() : nullptr;
}

// Appends an argument to the key of a kind of call: everything but the data. Of a list with more than `most` tensors, only those at
// either end.
void append_argument(const c10::IValue& value, bool reduce_op, size_t most, Key& key) {
  if (value.isTensor()) {
    const at::Tensor& t = value.toTensor();
    if (!t.defined())
      return key.push_back(-1);
    const auto sizes = t.sizes();
    key.push_back(static_cast<int64_t>(sizes.size()) << 16 | static_cast<int64_t>(t.device().type()) << 8 | static_cast<int64_t>(t.scalar_type()));
    key.insert(key.end(), sizes.begin(), sizes.end());
  } else if (value.isList()) {
    const auto items = value.toListRef();
    key.push_back(static_cast<int64_t>(items.size()));
    const bool all = items.size() <= most || items[0].isInt();
    for (size_t i = 0; i < items.size(); ++i)
      if (all || i < most / 2 || i >= items.size() - most / 2)
        append_argument(items[i], false, most, key);
  } else if (value.isInt()) {
    key.push_back(value.toInt());
  } else if (value.isBool()) {
    key.push_back(value.toBool());
  } else if (value.isObject()) {
    const auto object = unbox(value);
    key.push_back(reduce_op ? static_cast<c10d::ReduceOp*>(object.get())->op_ : reinterpret_cast<int64_t>(object.get()));
  } else {
    key.push_back(INT64_MIN + value.isNone());
  }
}

class Kernel : public c10::OperatorKernel {
 public:
  Kernel(const c10::OperatorHandle& op, const c10::OperatorHandle& planner, bool compares_all_tensors)
      : planner_(planner), arity_(op.schema().arguments().size()), most_(compares_all_tensors ? SIZE_MAX : MAX_COMPARED) {
    for (const auto& argument : op.schema().arguments())
      reduce_op_.push_back(argument.type()->repr_str().find("c10d.ReduceOp") != std::string::npos);
  }

  // Called by torch. Only the user's own exceptions leave it.
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    static const c10::DispatchKeySet after(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
    Recorder* const recorder = current.load(std::memory_order_acquire);
    Call call;
    if (recorder)
      run_guarded([&] { call = record_call(*recorder, *stack); });
    if (!call.stream)
      return op.redispatchBoxed(keys & after, stack);
    try {
      op.redispatchBoxed(keys & after, stack);
    } catch (...) {
      run_guarded([&] { recorder->finish(call, true); });
      throw;
    }
    run_guarded([&] {
      WorkPtr work;
      if (call.mode == WORK) {
        work = get_work(*stack);
      } else if (call.mode == TIMED) {
        work = get_work(*stack);
        recorder->time(call, work);
      }
      recorder->leave(call, std::move(work));
    });
  }

 private:
  template <class Do>
  static void run_guarded(Do action) {
    try {
      action();
    } catch (const PythonError& raised) {
      std::rethrow_exception(raised.error);
    } catch (const abi::__forced_unwind&) { // the thread is being cancelled, which must not be stopped
      throw;
    } catch (const std::exception& error) {
      fault(error.what());
    } catch (...) {
      fault("an unknown C++ exception");
    }
  }

  static WorkPtr get_work(const Stack& stack) {
    return c10::static_intrusive_pointer_cast<c10d::Work>(stack.empty() ? nullptr : unbox(stack.back()));
  }

  Call record_call(Recorder& recorder, const Stack& stack) {
    thread_local Key key;
    key.clear();
    key.push_back(reinterpret_cast<int64_t>(this));
    const c10::IValue* args = stack.data() + stack.size() - arity_;
    for (size_t i = 0; i < arity_; ++i)
      append_argument(args[i], reduce_op_[i], most_, key);
    return recorder.record_call(key, [&](Plan& plan) { return fetch_plan(args, plan); });
  }

  // Fetches a plan from Python. False if there is none this time.
  bool fetch_plan(const c10::IValue* args, Plan& plan) const {
    if (!is_python_running())
      return false;
    const auto fields = call_python(planner_, Stack(args, args + arity_)).toIntVector();
    if (fields.size() != 9)
      return false;
    plan.stream = reinterpret_cast<Stream*>(fields[0]);
    if (!plan.stream)
      return true;
    plan.agree = static_cast<uint64_t>(fields[1]);
    plan.body.uid = plan.stream->uid;
    plan.body.signature = static_cast<uint32_t>(fields[2]);
    plan.body.bytes = static_cast<uint64_t>(fields[3]);
    plan.body.peer = static_cast<int32_t>(fields[4]);
    plan.body.tag = static_cast<int32_t>(fields[5]);
    plan.body.flags = static_cast<uint32_t>(fields[6]);
    plan.blocks = fields[7];
    plan.mode = static_cast<int>(fields[8]);
    return true;
  }

  c10::OperatorHandle planner_;
  size_t arity_, most_;
  std::vector<bool> reduce_op_; // by argument
};

} // namespace

// ====== what Python calls: agent/recorder/native/library.py =============================================================

extern "C" {

// Called once, before `hw_register`.
void hw_start(Layout frames) {
  layout = frames;
  pthread_atfork(nullptr, nullptr, [] { current = nullptr; }); // the ring is the parent's
}

// Registers the kernel of c10d::`name`; hangwatch::`name` must be defined. Returns an error message, or null.
const char* hw_register(const char* name, bool compares_all_tensors) {
  static auto* const library = new torch::Library(torch::Library::IMPL, "c10d", c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
  static std::string problem;
  try {
    auto kernel = std::make_unique<Kernel>(find_operator(std::string("c10d::") + name), find_operator(std::string("hangwatch::") + name), compares_all_tensors);
    library->impl(name, torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
    return nullptr;
  } catch (const std::exception& error) {
    problem = error.what();
    return problem.c_str();
  }
}

Recorder* hw_attach(char* ring, uint64_t records_at, uint64_t records) {
  return new Recorder(ring, records_at, records);
}
void hw_use(Recorder* recorder) { current = recorder; }
uint64_t hw_settle(Recorder* recorder) { return recorder->update_streams(); }
void hw_forget_plans(Recorder* recorder) { recorder->forget_plans(); }
void hw_forget_codes(Recorder* recorder) { recorder->forget_codes(); }
void hw_judge(Recorder* recorder, uint64_t code, uint8_t verdict) { recorder->judge(code, verdict); }
Stream* hw_open(Recorder* recorder, uint32_t uid, uint64_t first_word) { return recorder->open(uid, first_word); }
void hw_close(Recorder* recorder, Stream* stream) { recorder->close(stream); }

// For calls that are recorded in Python, such as declared ones: enter the call, then finish it.
void hw_enter(Recorder* recorder, Stream* s, uint64_t agree, const char* packed_body, uint64_t blocked, int mode, Call* call) {
  RecordBody record_body;
  memcpy(&record_body, packed_body, sizeof record_body);
  *call = recorder->enter(*s, agree, record_body, blocked, mode);
}
void hw_finish(Recorder* recorder, const Call* call, bool raised) { recorder->finish(*call, raised); }

// For the test that both recorders sample the same calls.
int hw_sampling_level(uint64_t seq) { return sampling_level(seq); }
int hw_min_timed_level() { return MIN_TIMED_LEVEL; }

uint64_t hw_faults() { return faults; }
const char* hw_last_fault() { return last_fault; }

// Writes up to `most` frames of the calling thread, as code objects and the low halves of their instructions. Returns their number.
int hw_frames(uint64_t* codes, uint32_t* instructions, int most) {
  int n = 0;
  walk_frames([&](Place place) {
    if (n < most) {
      codes[n] = place.code;
      instructions[n] = place.instruction;
    }
    return ++n < most;
  });
  return n;
}
}
