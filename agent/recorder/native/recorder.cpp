// The recorder's kernels in C++: they write the ring that hangwatch/ring/layout.py documents, as agent/recorder/{kernels,call_reader,
// sequence}.py do, without the GIL.
//
// What a call means is decided in Python, once: the first call of a kind (operator, group, shapes, peer, ...) asks Python for a
// plan, by calling an operator `hangwatch::NAME` with the same arguments; further calls look the plan up. So both recorders give the
// same hashes and the same words. Python is also asked which line of code is the user's (`hangwatch::_site`), and, when another
// thread than before calls, what the one before it does meanwhile (`hangwatch::_meanwhile`). Everything else happens here, under one
// mutex that is held for some 100 ns, and never while waiting for the GIL, for torch, or for the destructor of anything of torch's.
//
// Needs torch's headers, not Python's: the interface to Python, at the end, is C, called through ctypes.

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

extern "C" { // of Python, and good without the GIL
int Py_IsInitialized(void);
__attribute__((weak)) int Py_IsFinalizing(void); // since Python 3.13
__attribute__((weak)) int _Py_IsFinalizing(void); // before
char* PyGILState_GetThisThreadState(void);
}

namespace {

using torch::jit::Stack;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// ====== what hangwatch/ring/layout.py and agent/recorder/streams.py name ======================================================

constexpr uint64_t UNKNOWN = ~0ull;
constexpr uint64_t BASE = 0x9E3779B97F4A7C15; // of the running hash
enum Flag : uint32_t { BLOCKING = 1, ASYNC = 2, RAISED = 4, SHARED = 8, TIMED_FLAG = 16 };
enum End : int { WORK = 0, NEXT = 1, RETURN = 2, UNTOLD = 3, TIMED = 4 };
enum Verdict : uint8_t { USER = 0, LIBRARY = 1, MACHINERY = 2 };
constexpr int MIN_TIMED_LEVEL = 6; // hangwatch/ring/sampling.py: one call in 64
constexpr size_t WORKS = 16; // unfinished ones kept in a sequence
constexpr size_t PLANS = 4096;
constexpr size_t COMPARED = 64; // tensors of a longer list, half of them at either end

#pragma pack(push, 4)
struct Described { // the part of a record that Python packs as RECORD_OF
  uint64_t bytes = 0;
  uint32_t uid = 0, signature = 0, site = 0, thread = 0, flags = 0;
  int32_t peer = -1, tag = 0;
};
struct Record {
  uint64_t stamp, entered_ns, done_ns, seq, chain, completed;
  Described of;
  uint32_t low;
};
#pragma pack(pop)
static_assert(sizeof(Described) == 36 && sizeof(Record) == 88, "as in hangwatch/ring/layout.py");

struct Sequence;

struct Call { // one under way; watched if it has a sequence
  Sequence* sequence = nullptr;
  uint64_t seq = 0, index = 0, entered_ns = 0;
  uint64_t blocked = 0; // the thread that it blocks
  int end = UNTOLD;
};

struct Unfinished {
  Call call;
  WorkPtr work; // none: it never tells
};
using Works = std::deque<Unfinished>;

struct Sequence {
  uint32_t uid;
  uint64_t* words; // its slot in the ring
  uint64_t entered = 0, completed = 0, chain = 0, entered_ns = 0;
  uint64_t thread = 0; // that made the last call
  bool free = false; // the one before it went on meanwhile
  bool polled = false; // by somebody just now
  std::atomic<bool> untimed{false}; // its Works do not tell when they are complete
  Works works;

  void completed_to(uint64_t seq) {
    if (completed != UNKNOWN)
      completed = seq;
  }
  void tell_progress() {
    words[0] = completed;
    words[1] = works.empty() ? 0 : works.front().call.entered_ns;
  }
};

struct Plan { // of all calls of a kind
  Sequence* sequence = nullptr; // none: they are not watched
  uint64_t agree = 0;
  Described of;
  bool blocks = false;
  int end = UNTOLD;
};

// ====== Python's side ===================================================================================================

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

// Whatever wants the GIL once the interpreter ends is ended itself, or waits for ever.
bool python_runs() {
  return Py_IsInitialized() && !(Py_IsFinalizing ? Py_IsFinalizing() : _Py_IsFinalizing());
}

struct Theirs { // an exception on its way through us
  std::exception_ptr error;
};

// What Python's side says, under the GIL. It keeps its own exceptions to itself: one of Python's that comes all the same is from a
// signal handler, as KeyboardInterrupt.
c10::IValue ask(const c10::OperatorHandle& op, Stack stack) {
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::BackendSelect), &stack);
  } catch (const std::exception& error) {
    const char* kind = typeid(error).name(); // the headers, torch/csrc/Exceptions.h and pybind11's, need Python's
    if (strstr(kind, "python_error") || strstr(kind, "error_already_set"))
      throw Theirs{std::current_exception()};
    throw;
  }
  return stack.back();
}

c10::OperatorHandle operator_of(const std::string& name) { // as "c10d::send" or "c10d::put.out"
  const size_t dot = name.find('.');
  const std::string overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.substr(0, dot).c_str(), overload.c_str());
}

uint32_t ask_site() { // of the call that this thread makes
  static const c10::OperatorHandle op = operator_of("hangwatch::_site");
  return static_cast<uint32_t>(ask(op, {}).toInt());
}

uint32_t ask_meanwhile(uint64_t thread) { // what it does: bit 0, torch.distributed; bit 1, something of its own
  static const c10::OperatorHandle op = operator_of("hangwatch::_meanwhile");
  return static_cast<uint32_t>(ask(op, {static_cast<int64_t>(thread)}).toInt());
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

// The frames of the calling thread, newest first. They stand still while it is in here, so nobody's lock is needed to read them.
template <class Visit> // bool(Place): false ends it
void walk(Visit visit) {
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

  // A call for which there may be a plan: `learn` gives one, and says whether it is worth keeping.
  template <class Learn>
  Call note(const Key& key, Learn learn) {
    Works over;
    Lock lock(mutex_);
    Plan plan;
    if (auto found = plans_.find(key); found != plans_.end()) {
      plan = found->second;
    } else {
      const Key mine = key; // the caller's may be used for another call meanwhile
      const uint64_t generation = generation_;
      lock.unlock();
      const bool keep = learn(plan);
      lock.lock();
      if (keep && generation == generation_) { // else what Python said may hold no more
        if (plans_.size() >= PLANS)
          plans_.clear();
        plans_.emplace(mine, plan);
      }
    }
    if (!plan.sequence)
      return {};
    plan.of.site = site(lock);
    const uint64_t me = static_cast<uint64_t>(pthread_self());
    plan.of.thread = static_cast<uint32_t>(me);
    return enter(*plan.sequence, plan.agree, plan.of, plan.blocks ? me : 0, plan.end, over, lock);
  }

  Call enter(Sequence& s, uint64_t agree, const Described& of, uint64_t blocked, int end) {
    Works over;
    Lock lock(mutex_);
    return enter(s, agree, of, blocked, end, over, lock);
  }

  void leave(const Call& call, WorkPtr work) {
    Lock lock(mutex_);
    if (call.end == RETURN)
      finish(call);
    else if (call.end != UNTOLD && call.sequence->completed != UNKNOWN)
      call.sequence->works.push_back({call, std::move(work)});
  }

  // Has the Work of some calls, the same on every rank, note when they are complete, on whichever thread completes them. What it
  // keeps holds no tensor.
  void time(const Call& call, const WorkPtr& work) {
    if (sampling_level(call.seq) < MIN_TIMED_LEVEL || !work || call.sequence->untimed.load(std::memory_order_relaxed))
      return;
    try {
      if (auto future = work->getFuture())
        return future->addCallback([this, index = call.index](c10::ivalue::Future& over) noexcept {
          if (!over.hasError())
            over_at(index, now_ns());
        });
    } catch (const std::exception&) { // most backends' have no future
    }
    call.sequence->untimed = true;
  }

  void finish(const Call& call, bool raised) {
    Lock lock(mutex_);
    if (Record& r = slot(call.index); raised && r.stamp == call.index + 1)
      r.of.flags |= RAISED;
    finish(call);
  }

  // What the newest records say, for when they are overwritten, and how far the calls got. Gives the number of records that
  // this covers.
  uint64_t settle() {
    Works over;
    Lock lock(mutex_);
    const uint64_t written = written_, now = now_ns();
    for (size_t i = 0; i < sequences_.size(); ++i) { // by number: others may open some while the lock is let go
      Sequence& s = *sequences_[i];
      if (!s.works.empty())
        poll(s, now, over, lock);
      else
        s.tell_progress(); // see Sequence.settle in sequence.py
      s.words[2] = s.entered;
      s.words[3] = s.chain;
      s.words[4] = s.entered_ns;
    }
    return written;
  }

  Sequence* open(uint32_t uid, uint64_t first_word) {
    Lock lock(mutex_);
    sequences_.push_back(new Sequence{uid, reinterpret_cast<uint64_t*>(ring_) + first_word});
    return sequences_.back();
  }

  // The sequence itself stays, for a thread that may still have it.
  void close(Sequence* s) {
    Works over;
    Lock lock(mutex_);
    over.swap(s->works);
    sequences_.erase(std::remove(sequences_.begin(), sequences_.end(), s), sequences_.end());
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

  Call enter(Sequence& s, uint64_t agree, Described of, uint64_t blocked, int end, Works& over, Lock& lock) {
    const uint64_t me = static_cast<uint64_t>(pthread_self()), now = now_ns();
    if (s.thread != me && changes_to(s, me, lock))
      of.flags |= SHARED;
    if (end == UNTOLD) {
      s.completed = UNKNOWN;
      s.tell_progress();
    }
    if (s.completed == UNKNOWN || (!s.works.empty() && s.works.back().call.blocked == me))
      while (!s.works.empty()) { // a blocking call is over once its thread makes the next one
        over.push_back(std::move(s.works.back()));
        s.works.pop_back();
      }
    else if (!s.works.empty() && poll(s, now, over, lock) && s.works.size() >= WORKS) {
      over.push_back(std::move(s.works.back()));
      s.works.pop_back();
    }
    if (s.works.empty())
      s.completed_to(s.entered);
    s.entered_ns = now;
    s.chain = s.chain * BASE + agree;
    const Call call{&s, ++s.entered, written_++, now, blocked, end};
    Record& r = slot(call.index);
    __atomic_store_n(&r.low, 0, __ATOMIC_RELAXED); // nobody takes it for whole from here on
    __atomic_store_n(&r.stamp, call.index + 1, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    r.entered_ns = now;
    r.done_ns = 0;
    r.seq = call.seq;
    r.chain = s.chain;
    r.completed = s.completed;
    r.of = of;
    __atomic_store_n(&r.low, static_cast<uint32_t>(call.index + 1), __ATOMIC_RELEASE);
    return call;
  }

  void finish(const Call& call) {
    done(call.index, now_ns());
    Sequence& s = *call.sequence;
    auto last = std::find_if(s.works.rbegin(), s.works.rend(), [](const Unfinished& u) { return bool(u.work); });
    if (last != s.works.rend()) { // asynchronous calls before it are not complete: it counts as complete with the last of them
      WorkPtr work = last->work;
      s.works.push_back({call, std::move(work)});
    } else if (s.completed != UNKNOWN) {
      s.works.clear();
      s.completed = s.entered;
      s.tell_progress();
    }
  }

  void done(uint64_t index, uint64_t now) {
    if (Record& r = slot(index); r.stamp == index + 1 && !(r.of.flags & TIMED_FLAG))
      r.done_ns = now;
  }

  void over_at(uint64_t index, uint64_t now) {
    Lock lock(mutex_);
    if (Record& r = slot(index); r.stamp == index + 1) {
      r.done_ns = now;
      r.of.flags |= TIMED_FLAG;
    }
  }

  // Moves finished works to `over`, whose owner destroys them without the lock. True while some call is unfinished.
  bool poll(Sequence& s, uint64_t now, Works& over, Lock& lock) {
    if (s.polled)
      return !s.works.empty();
    s.polled = true;
    auto complete = [&](const Unfinished& asked) { // false also where it is not there any more afterwards
      const uint64_t index = asked.call.index;
      const bool front = &asked == &s.works.front();
      WorkPtr work = asked.work;
      lock.unlock();
      bool is = false;
      try {
        is = work->isCompleted();
      } catch (const std::exception& error) {
        fault(error.what());
      } catch (...) {
        fault("isCompleted");
      }
      work.reset();
      lock.lock();
      return is && !s.works.empty() && (front ? s.works.front() : s.works.back()).call.index == index;
    };
    while (!s.works.empty()) {
      if (!(s.works.front().work ? complete(s.works.front()) : s.works.size() > 1))
        break;
      done(s.works.front().call.index, now);
      s.completed_to(s.works.front().call.seq);
      over.push_back(std::move(s.works.front()));
      s.works.pop_front();
    }
    if (s.works.size() > 1 && s.works.back().work && complete(s.works.back())) {
      s.completed_to(s.works.back().call.seq); // some works never say that they are complete; a later one's word covers them
      while (!s.works.empty()) {
        over.push_back(std::move(s.works.front()));
        s.works.pop_front();
      }
    }
    s.polled = false;
    s.tell_progress();
    return !s.works.empty();
  }

  // See Sequence._changes_to in sequence.py.
  bool changes_to(Sequence& s, uint64_t me, Lock& lock) {
    const uint64_t before = s.thread;
    const bool held = !s.works.empty() && s.works.back().call.blocked == before;
    s.thread = me;
    if (!before || !python_runs())
      return false;
    lock.unlock();
    const uint32_t does = ask_meanwhile(before);
    lock.lock();
    const bool shared = ((does & 1) && held) || ((does & 2) && s.free);
    s.free = does & 2;
    return shared;
  }

  // The number of the user's line behind this call: CallSites.find in callsite.py, by what it said before.
  uint32_t site(Lock& lock) {
    int64_t found = 0;
    bool met = false; // a frame of a library's
    walk([&](Place place) {
      auto code = codes_.find(place.code);
      if (code == codes_.end()) {
        found = -1;
        return false;
      }
      if (code->second == MACHINERY || (code->second == LIBRARY && met))
        return true;
      auto known = places_.find(place);
      found = known == places_.end() ? -1 : int64_t{known->second};
      met = true;
      return code->second == LIBRARY;
    });
    if (found >= 0 || !python_runs())
      return found > 0 ? static_cast<uint32_t>(found) : 0;
    const uint64_t generation = generation_;
    lock.unlock();
    const uint32_t number = ask_site();
    lock.lock();
    if (generation == generation_) {
      Place library{};
      bool user = false;
      walk([&](Place place) {
        auto code = codes_.emplace(place.code, MACHINERY).first; // where Python itself shows no frame, as on entry from C
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
  uint64_t generation_ = 0; // of what Python said
  std::unordered_map<Key, Plan, Hash> plans_;
  std::unordered_map<uint64_t, uint8_t> codes_;
  std::unordered_map<Place, uint32_t, Hash> places_;
  std::vector<Sequence*> sequences_;
};

// None, or the one that all kernels use. Those before it are never freed: a thread may still be in one, and after a fork its mutex
// may be locked for good.
std::atomic<Recorder*> current{nullptr};

// ====== kernels =========================================================================================================

c10::intrusive_ptr<torch::CustomClassHolder> held(const c10::IValue& value) {
  return value.isObject() ? value.toObjectRef().getSlot(0).toCapsule() : nullptr;
}

// What makes a call a call of its kind: everything but the data. Of a list with more than `most` tensors, those at either end.
void append(const c10::IValue& value, bool reduce_op, size_t most, Key& key) {
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
        append(items[i], false, most, key);
  } else if (value.isInt()) {
    key.push_back(value.toInt());
  } else if (value.isBool()) {
    key.push_back(value.toBool());
  } else if (value.isObject()) {
    const auto object = held(value);
    key.push_back(reduce_op ? static_cast<c10d::ReduceOp*>(object.get())->op_ : reinterpret_cast<int64_t>(object.get()));
  } else {
    key.push_back(INT64_MIN + value.isNone());
  }
}

class Kernel : public c10::OperatorKernel {
 public:
  Kernel(const c10::OperatorHandle& op, const c10::OperatorHandle& planner, bool compares_all_tensors)
      : planner_(planner), arity_(op.schema().arguments().size()), most_(compares_all_tensors ? SIZE_MAX : COMPARED) {
    for (const auto& argument : op.schema().arguments())
      reduce_op_.push_back(argument.type()->repr_str().find("c10d.ReduceOp") != std::string::npos);
  }

  // What torch calls. Only the user's own exceptions leave it.
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    static const c10::DispatchKeySet after(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
    Recorder* const recorder = current.load(std::memory_order_acquire);
    Call call;
    if (recorder)
      ours([&] { call = note(*recorder, *stack); });
    if (!call.sequence)
      return op.redispatchBoxed(keys & after, stack);
    try {
      op.redispatchBoxed(keys & after, stack);
    } catch (...) {
      ours([&] { recorder->finish(call, true); });
      throw;
    }
    ours([&] {
      WorkPtr work;
      if (call.end == WORK) {
        work = work_of(*stack);
      } else if (call.end == TIMED) {
        work = work_of(*stack);
        recorder->time(call, work);
      }
      recorder->leave(call, std::move(work));
    });
  }

 private:
  template <class Do>
  static void ours(Do what) {
    try {
      what();
    } catch (const Theirs& theirs) {
      std::rethrow_exception(theirs.error);
    } catch (const abi::__forced_unwind&) { // this thread is being ended, which nobody may stop
      throw;
    } catch (const std::exception& error) {
      fault(error.what());
    } catch (...) {
      fault("not even an exception");
    }
  }

  static WorkPtr work_of(const Stack& stack) {
    return c10::static_intrusive_pointer_cast<c10d::Work>(stack.empty() ? nullptr : held(stack.back()));
  }

  Call note(Recorder& recorder, const Stack& stack) {
    thread_local Key key;
    key.clear();
    key.push_back(reinterpret_cast<int64_t>(this));
    const c10::IValue* args = stack.data() + stack.size() - arity_;
    for (size_t i = 0; i < arity_; ++i)
      append(args[i], reduce_op_[i], most_, key);
    return recorder.note(key, [&](Plan& plan) { return learn(args, plan); });
  }

  // Asks Python. False: it does not know, this time.
  bool learn(const c10::IValue* args, Plan& plan) const {
    if (!python_runs())
      return false;
    const auto told = ask(planner_, Stack(args, args + arity_)).toIntVector();
    if (told.size() != 9)
      return false;
    plan.sequence = reinterpret_cast<Sequence*>(told[0]);
    if (!plan.sequence)
      return true;
    plan.agree = static_cast<uint64_t>(told[1]);
    plan.of.uid = plan.sequence->uid;
    plan.of.signature = static_cast<uint32_t>(told[2]);
    plan.of.bytes = static_cast<uint64_t>(told[3]);
    plan.of.peer = static_cast<int32_t>(told[4]);
    plan.of.tag = static_cast<int32_t>(told[5]);
    plan.of.flags = static_cast<uint32_t>(told[6]);
    plan.blocks = told[7];
    plan.end = static_cast<int>(told[8]);
    return true;
  }

  c10::OperatorHandle planner_;
  size_t arity_, most_;
  std::vector<bool> reduce_op_; // by argument
};

} // namespace

// ====== what Python calls: agent/recorder/native/library.py =============================================================

extern "C" {

// Once. The kernels follow with `hw_register`.
void hw_start(Layout frames) {
  layout = frames;
  pthread_atfork(nullptr, nullptr, [] { current = nullptr; }); // the ring is the parent's
}

// Registers the kernel of c10d::`name`; hangwatch::`name` must be defined. Returns the error, or null.
const char* hw_register(const char* name, bool compares_all_tensors) {
  static auto* const library = new torch::Library(torch::Library::IMPL, "c10d", c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
  static std::string problem;
  try {
    auto kernel = std::make_unique<Kernel>(operator_of(std::string("c10d::") + name), operator_of(std::string("hangwatch::") + name), compares_all_tensors);
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
uint64_t hw_settle(Recorder* recorder) { return recorder->settle(); }
void hw_forget_plans(Recorder* recorder) { recorder->forget_plans(); }
void hw_forget_codes(Recorder* recorder) { recorder->forget_codes(); }
void hw_judge(Recorder* recorder, uint64_t code, uint8_t verdict) { recorder->judge(code, verdict); }
Sequence* hw_open(Recorder* recorder, uint32_t uid, uint64_t first_word) { return recorder->open(uid, first_word); }
void hw_close(Recorder* recorder, Sequence* sequence) { recorder->close(sequence); }

// For calls that Python itself records: the index of the record; then the call's end.
void hw_enter(Recorder* recorder, Sequence* s, uint64_t agree, const char* described, uint64_t blocked, int end, Call* call) {
  Described of;
  memcpy(&of, described, sizeof of);
  *call = recorder->enter(*s, agree, of, blocked, end);
}
void hw_finish(Recorder* recorder, const Call* call, bool raised) { recorder->finish(*call, raised); }

// For the test that both recorders sample the same calls.
int hw_sampling_level(uint64_t seq) { return sampling_level(seq); }
int hw_min_timed_level() { return MIN_TIMED_LEVEL; }

uint64_t hw_faults() { return faults; }
const char* hw_last_fault() { return last_fault; }

// The calling thread's frames, as code objects and the low halves of their instructions: how many of the `most`.
int hw_frames(uint64_t* codes, uint32_t* instructions, int most) {
  int n = 0;
  walk([&](Place place) {
    if (n < most) {
      codes[n] = place.code;
      instructions[n] = place.instruction;
    }
    return ++n < most;
  });
  return n;
}
}
