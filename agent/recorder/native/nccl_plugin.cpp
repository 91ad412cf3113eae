// A profiler plugin of NCCL: it counts the calls of every communicator of the process, and with
// HANGWATCH_NCCL=device how far the device has come in them, in the ring's table of communicators
// (hangwatch/ring/layout.py). NCCL calls it for communicators that torch does not know, too.
//
// NCCL loads it from NCCL_PROFILER_PLUGIN when it creates the first communicator, and unloads it
// with the last. It runs inside the job: it takes no lock, allocates nothing for an event, starts no
// thread, and needs no library but libc. It is linked with -z nodelete, and never frees anything,
// since events may arrive after a communicator's end.
//
// The interface is that of NCCL's ext-profiler (versions 4 to 6 of the plugin, NCCL 2.27 and
// later). The fields that are read here have the same offsets in all three, but the type of an event
// is one byte in version 4.

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

namespace {

// NCCL's types of events, which are the bits of its event mask, and the state with which the device
// reports the end of a kernel's part.
enum : uint64_t { COLLECTIVE = 2, MESSAGE = 4, KERNEL = 64, COLLECTIVE_CALL = 512, MESSAGE_CALL = 1024 };
constexpr int KERNEL_ENDED = 22;

struct Event {
  uint64_t type;
  void* parent;
  int rank;
  union {
    struct {
      const char* function;
      size_t count;
      const char* dtype;
      int root;
      void* stream;
      bool is_captured;
    } collective_call;
    struct {
      const char* function;
      size_t count;
      const char* dtype;
      void* stream;
      bool is_captured;
    } message_call;
    struct {
      uint64_t number;
      const char* function;
      const void* input;
      void* output;
      size_t count;
      int root;
      const char* dtype;
      uint8_t channels;
    } collective;
    struct {
      const char* function;
      void* buffer;
      const char* dtype;
      size_t count;
      int peer;
      uint8_t channels;
    } message;
  };
};
static_assert(
    offsetof(Event, collective) == 24 && offsetof(Event, collective.count) == 56 &&
        offsetof(Event, collective.channels) == 80 && offsetof(Event, message.channels) == 60,
    "the layout of ncclProfilerEventDescr_v5_t");

// The ring's table of communicators: see hangwatch/ring/layout.py. Each word is written by one
// thread at a time, and atomically.
constexpr uint64_t CALLS_KEPT = 64;

struct CallEntry {
  uint64_t number; // 0 while it is written
  uint64_t entered_ns, chain, agreement_hash, count;
  int32_t root;
  uint32_t flags;
  char function[24], dtype[16];
};

// The states of a slot. One that is taken is being written.
constexpr uint64_t FREE = 0, OPEN = 1, CLOSED = 2, TAKEN = 3;

struct Slot {
  uint64_t state, uid, id;
  int32_t rank, size;
  uint64_t torch_stream, calls, captured, messages, enqueued, started, completed, lost;
  uint64_t chain, entered_ns, device_ns, closed_ns;
  char name[48];
  CallEntry entries[CALLS_KEPT];
};
static_assert(sizeof(CallEntry) == 88 && offsetof(Slot, entries) == 176, "as in layout.py");

struct Table {
  uint64_t slot_count, created, uncovered, follows_device;
  Slot slots[];
};

constexpr uint32_t CAPTURED = 1; // a flag of an entry
constexpr uint64_t CHAIN_BASE = 0x9E3779B97F4A7C15; // as in ring_format.h

// A collective that was passed to the device. `call` is the number of the call that it is of.
struct Operation {
  struct Communicator* communicator;
  uint64_t call;
  uint32_t channels, started, ended;
  uint32_t has_successor; // the same call has a further operation
};
constexpr uint64_t OPERATIONS_KEPT = 1024; // a power of two

struct Communicator {
  Slot* slot;
  uint64_t torch_seq; // the call of torch of which the newest call of this communicator is
  uint64_t operation_count;
  Operation operations[]; // with HANGWATCH_NCCL=device only
};

Table* table; // null: nothing is recorded
bool follows_device; // HANGWATCH_NCCL=device
Slot unrecorded; // written to in place of a slot of the table if that is full
alignas(8) char no_operation; // the handle of an event that has no operation

// The call of torch that this thread makes: its stream, and its number there.
thread_local uint32_t current_stream;
thread_local uint64_t current_seq;

template <class Value>
void store(Value& word, Value value) {
  __atomic_store_n(&word, value, __ATOMIC_RELEASE);
}

template <class Value>
Value load(const Value& word) {
  return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
}

uint64_t add_one(uint64_t& word) { return __atomic_add_fetch(&word, 1, __ATOMIC_ACQ_REL); }

void raise_to(uint64_t& word, uint64_t value) {
  uint64_t present = load(word);
  while (present < value && !__atomic_compare_exchange_n(
                                &word, &present, value, true, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
  }
}

uint64_t read_clock_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

template <size_t SIZE>
void copy_text(char (&to)[SIZE], const char* from) {
  strncpy(to, from ? from : "", SIZE - 1);
  to[SIZE - 1] = 0;
}

// FNV-1a (Fowler, Noll, Vo) over text and numbers.
uint64_t extend_hash(uint64_t hash, const void* data, size_t size) {
  for (size_t i = 0; i < size; ++i)
    hash = (hash ^ static_cast<const uint8_t*>(data)[i]) * 0x100000001B3;
  return hash;
}

uint64_t hash_call(const char* function, const char* dtype, uint64_t count, int64_t root) {
  uint64_t hash = 0xCBF29CE484222325;
  const char* const texts[] = {function, dtype};
  for (const char* text : texts)
    if (text)
      hash = extend_hash(hash, text, strnlen(text, 32));
  const int64_t numbers[] = {static_cast<int64_t>(count), root};
  return extend_hash(hash, numbers, sizeof numbers);
}

bool change_state(Slot& slot, uint64_t from, uint64_t to) {
  return __atomic_compare_exchange_n(
      &slot.state, &from, to, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

// A free slot, else that of the communicator that was closed first; `unrecorded` if all are in use.
Slot* take_slot() {
  Slot* const slots = table->slots;
  for (uint64_t i = 0; i < table->slot_count; ++i)
    if (change_state(slots[i], FREE, TAKEN))
      return &slots[i];
  Slot* oldest = nullptr;
  do {
    oldest = nullptr;
    for (uint64_t i = 0; i < table->slot_count; ++i)
      if (load(slots[i].state) == CLOSED && (!oldest || slots[i].closed_ns < oldest->closed_ns))
        oldest = &slots[i];
    if (!oldest) {
      add_one(table->uncovered);
      return &unrecorded;
    }
  } while (!change_state(*oldest, CLOSED, TAKEN)); // another thread took it
  return oldest;
}

// The context of a new communicator; null if it is not recorded.
Communicator* open_communicator(const char* name, uint64_t id, int rank, int size) {
  if (!table)
    return nullptr;
  auto* const communicator = static_cast<Communicator*>(
      calloc(1, sizeof(Communicator) + (follows_device ? OPERATIONS_KEPT * sizeof(Operation) : 0)));
  if (!communicator)
    return nullptr;
  Slot& slot = *(communicator->slot = take_slot());
  if (&slot == &unrecorded)
    return communicator;
  memset(&slot.uid, 0, sizeof slot - offsetof(Slot, uid));
  slot.uid = add_one(table->created);
  slot.id = id;
  slot.rank = rank;
  slot.size = size;
  copy_text(slot.name, name);
  store(slot.state, OPEN);
  return communicator;
}

// Counts a collective, and returns the number of the call that it belongs to. torch may make several
// for one call of its own, which then count as one.
uint64_t count_call(Communicator& communicator, const char* function, const char* dtype,
                    uint64_t count, int root, bool is_captured) {
  Slot& slot = *communicator.slot;
  if (current_stream) {
    if (load(slot.torch_stream) == current_stream && communicator.torch_seq == current_seq)
      return load(slot.calls);
    store(slot.torch_stream, uint64_t{current_stream});
    communicator.torch_seq = current_seq;
  }
  const uint64_t number = load(slot.calls) + 1, now_ns = read_clock_ns();
  const uint64_t agreement_hash = hash_call(function, dtype, count, root);
  CallEntry& entry = slot.entries[number % CALLS_KEPT];
  store(entry.number, uint64_t{0});
  entry.entered_ns = now_ns;
  entry.agreement_hash = agreement_hash;
  entry.chain = slot.chain * CHAIN_BASE + agreement_hash;
  entry.count = count;
  entry.root = root;
  entry.flags = is_captured ? CAPTURED : 0;
  copy_text(entry.function, function);
  copy_text(entry.dtype, dtype);
  store(entry.number, number);
  store(slot.chain, entry.chain);
  store(slot.entered_ns, now_ns);
  if (is_captured)
    add_one(slot.captured);
  store(slot.calls, number);
  return number;
}

// Records that a collective of a call was passed to the device.
Operation* begin_operation(Communicator& communicator, uint64_t call, uint32_t channels) {
  Slot& slot = *communicator.slot;
  const uint64_t index = communicator.operation_count++;
  Operation* const operations = communicator.operations;
  if (index) {
    Operation& previous = operations[(index - 1) % OPERATIONS_KEPT];
    if (previous.call == call)
      store(previous.has_successor, 1u);
  }
  Operation& operation = operations[index % OPERATIONS_KEPT];
  if (operation.call && load(operation.ended) < operation.channels)
    add_one(slot.lost); // it is still on the device: from here on its progress is not known
  operation.communicator = &communicator;
  operation.call = call;
  operation.channels = channels ? channels : 1;
  store(operation.started, 0u);
  store(operation.ended, 0u);
  store(operation.has_successor, 0u);
  raise_to(slot.enqueued, call);
  return &operation;
}

// NCCL reports the kernel's part on one of the operation's channels.
void begin_kernel(Operation& operation) {
  if (__atomic_fetch_add(&operation.started, 1, __ATOMIC_ACQ_REL))
    return;
  Slot& slot = *operation.communicator->slot;
  raise_to(slot.started, operation.call);
  store(slot.device_ns, read_clock_ns());
}

void end_kernel(Operation& operation) {
  if (__atomic_add_fetch(&operation.ended, 1, __ATOMIC_ACQ_REL) != operation.channels)
    return;
  Slot& slot = *operation.communicator->slot;
  if (!load(operation.has_successor))
    raise_to(slot.completed, operation.call);
  store(slot.device_ns, read_clock_ns());
}

// A handle is an operation, `no_operation`, or an operation plus 1 for its kernel; and while its
// collective has not been passed to the device, the number of a call, shifted, plus 2.
uintptr_t to_bits(void* handle) { return reinterpret_cast<uintptr_t>(handle); }

Operation* get_operation(void* handle) {
  const uintptr_t bits = to_bits(handle);
  if (!handle || handle == &no_operation || bits & 2)
    return nullptr;
  return reinterpret_cast<Operation*>(bits & ~uintptr_t{1});
}

void* start_event(Communicator& communicator, uint64_t type, const Event& event) {
  switch (type) {
    case COLLECTIVE_CALL: {
      const auto& call = event.collective_call;
      const uint64_t number = count_call(
          communicator, call.function, call.dtype, call.count, call.root, call.is_captured);
      return reinterpret_cast<void*>(number << 2 | 2);
    }
    case MESSAGE_CALL:
    case MESSAGE: // it has a parent if its call was counted
      if (!event.parent || type == MESSAGE_CALL)
        add_one(communicator.slot->messages);
      return &no_operation;
    case COLLECTIVE: {
      const auto& collective = event.collective;
      const uintptr_t parent = to_bits(event.parent);
      uint64_t number = parent & 2 ? parent >> 2 : 0;
      if (!number) // version 4 has no event for the call
        number = count_call(communicator, collective.function, collective.dtype, collective.count,
                            collective.root, false);
      if (!follows_device)
        return &no_operation;
      return begin_operation(communicator, number, collective.channels);
    }
    case KERNEL:
      if (Operation* const operation = get_operation(event.parent)) {
        begin_kernel(*operation);
        return reinterpret_cast<void*>(to_bits(operation) | 1);
      }
      return nullptr;
    default:
      return nullptr;
  }
}

int stop_event(void*) { return 0; }

int record_state(void* handle, int state, void*) {
  Operation* const operation = get_operation(handle);
  if (state == KERNEL_ENDED && operation && to_bits(handle) & 1)
    end_kernel(*operation);
  return 0;
}

int finalize(void* context) {
  if (context) {
    Slot& slot = *static_cast<Communicator*>(context)->slot;
    slot.closed_ns = read_clock_ns();
    store(slot.state, CLOSED);
  }
  return 0;
}

int init(void** context, const char* name, uint64_t id, int size, int rank) {
  *context = open_communicator(name, id, rank, size);
  return *context ? 0 : 1; // with 1, NCCL continues without a profiler
}

template <uint64_t TYPE_MASK>
int start(void* context, void** handle, Event* event) {
  *handle = nullptr;
  if (context && table)
    *handle = start_event(*static_cast<Communicator*>(context), event->type & TYPE_MASK, *event);
  return 0;
}

struct PluginV4 {
  const char* name;
  int (*init)(void**, int*, const char*, uint64_t, int, int, int, void*);
  int (*start)(void*, void**, Event*);
  int (*stop)(void*);
  int (*record)(void*, int, void*);
  int (*finalize)(void*);
};

struct PluginV5 {
  const char* name;
  int (*init)(void**, uint64_t, int*, const char*, int, int, int, void*);
  int (*start)(void*, void**, Event*);
  int (*stop)(void*);
  int (*record)(void*, int, void*);
  int (*finalize)(void*);
};

int init_v4(void** context, int* mask, const char* name, uint64_t id, int, int size, int rank, void*) {
  // This version has no events of the calls themselves.
  *mask = static_cast<int>(COLLECTIVE | MESSAGE | (follows_device ? KERNEL : uint64_t{0}));
  return init(context, name, id, size, rank);
}

int init_v5(void** context, uint64_t id, int* mask, const char* name, int, int size, int rank, void*) {
  *mask = static_cast<int>(COLLECTIVE_CALL | MESSAGE_CALL | (follows_device ? COLLECTIVE | KERNEL : uint64_t{0}));
  return init(context, name, id, size, rank);
}

} // namespace

extern "C" {

#define EXPORTED __attribute__((visibility("default")))

// The symbols that NCCL looks for.
EXPORTED PluginV4 ncclProfiler_v4{"hangwatch", init_v4, start<0xFF>, stop_event, record_state, finalize};
EXPORTED PluginV5 ncclProfiler_v5{"hangwatch", init_v5, start<~0ull>, stop_event, record_state, finalize};
EXPORTED PluginV5 ncclProfiler_v6{"hangwatch", init_v5, start<~0ull>, stop_event, record_state, finalize};

// Makes communicators that are created from now on use this table, which stays mapped for ever.
// Called once, by agent/recorder/nccl.py.
EXPORTED void hw_attach_table(void* new_table, uint64_t slot_count, bool with_device) {
  follows_device = with_device;
  auto* const attached = static_cast<Table*>(new_table);
  attached->follows_device = with_device;
  attached->slot_count = slot_count;
  store(table, attached);
  pthread_atfork(nullptr, nullptr, [] { store(table, static_cast<Table*>(nullptr)); });
}

// Says that this thread makes a call of torch; stream 0: it makes none any more.
EXPORTED void hw_set_current_call(uint32_t stream, uint64_t seq) {
  current_stream = stream;
  current_seq = seq;
}

} // extern "C"
