// What the parts of the stand-in for libnccl share: communicators, their shared memory and the operations on them.
#pragma once

#include "fakegpu.h"

#include <vector>

namespace fakegpu::nccl {

constexpr int kSuccess = 0;
constexpr int kInvalidArgument = 4;
constexpr int kInvalidUsage = 5;
constexpr int kRemoteError = 6;

constexpr int kMaxRanks = 64;
constexpr size_t kSlotBytes = 512 << 10; // what one rank posts in one round
constexpr size_t kMailBytes = 128 << 10; // what one sender posts to one receiver

enum class Kind : int { all_reduce, all_gather, reduce_scatter, broadcast, reduce, all_to_all, gather, scatter, send, recv };
constexpr int kKinds = 10;
inline bool is_point_to_point(Kind kind) { return kind == Kind::send || kind == Kind::recv; }

// What all members must agree on.
struct Signature {
    int kind;
    int dtype;
    int op;
    int root;
    uint64_t count;
};

struct Operation {
    Kind kind;
    const void* input = nullptr;
    void* output = nullptr;
    size_t count = 0;
    int dtype = 0;
    int op = 0;
    int root = 0;         // or the peer of a send or receive
    double scalar = 1;    // of a pre-multiplied sum
};

// --- the memory that the members of one communicator share ---
struct RankArea {
    std::atomic<uint32_t> joined;
    std::atomic<int32_t> pid;
    std::atomic<uint32_t> arrived; // how many barriers this rank has reached
    std::atomic<uint32_t> host_arrived;
    std::atomic<uint32_t> gone;    // aborted or destroyed
    Signature signature;
    int split_color;
    int split_key;
};

struct Mailbox { // one sender, one receiver
    std::atomic<uint32_t> is_full;
    uint64_t total;
    uint64_t length;
};

struct Header {
    std::atomic<uint32_t> signal; // a futex: changes whenever anything does
    std::atomic<uint32_t> joined;
    RankArea ranks[kMaxRanks];
};

class Segment {
  public:
    // Maps the segment called `name`, creates it if need be, and waits until all `size` members are there.
    Segment(const std::string& name, int size, int rank);
    ~Segment();

    Header& header() { return *header_; }
    RankArea& rank(int index) { return header_->ranks[index]; }
    char* slot(int index);
    Mailbox& mailbox(int from, int to);
    char* mail(int from, int to);
    void notify();
    void wait(uint32_t seen); // until `signal` is no longer `seen`, at most 50 ms

  private:
    int size_;
    size_t bytes_;
    Header* header_;
};

class Profiler;

struct Communicator {
    std::string name;  // of its segment: equal on all members, and different from all others'
    std::string label; // what the program calls it, if anything
    int rank = 0;
    int size = 0;
    int device = 0;
    std::shared_ptr<Segment> segment;
    std::shared_ptr<Profiler> profiler; // null: no plugin
    std::atomic<bool> is_aborted{false};
    std::atomic<bool> is_vanished_peer{false};
    uint32_t barriers = 0;      // of the device's side
    uint32_t host_barriers = 0; // of ncclCommSplit
    uint32_t children = 0;
    // One communicator runs in issue order, whatever streams its operations are on.
    std::mutex order_mutex;
    std::condition_variable order_changed;
    uint64_t issued = 0;
    uint64_t finished = 0;
};
using CommunicatorPtr = std::shared_ptr<Communicator>;

CommunicatorPtr join(const std::string& name, const std::string& label, int size, int rank);
CommunicatorPtr split(const CommunicatorPtr& parent, const std::string& label, int color, int key);
bool has_dead_peer(Communicator& communicator);

// Waits until `is_ready()`; false if the communicator was aborted meanwhile.
bool wait_for_peers(Communicator& communicator, const std::function<bool()>& is_ready);

size_t element_size(int dtype);
// accumulator (as double or 64-bit integer semantics) of `count` elements: target = target OP source
void reduce_into(void* target, const void* source, size_t count, int dtype, int op);
void scale(void* target, size_t count, int dtype, double factor);

void run_collective(Communicator& communicator, const Operation& operation);
void run_point_to_point(Communicator& communicator, const std::vector<Operation>& operations);

// Between ncclGroupStart and ncclGroupEnd collects, otherwise issues at once.
int issue(void* communicator, Stream* stream, const Operation& operation);
void begin_group();
int end_group();

CommunicatorPtr find_communicator(void* handle);
void* add_communicator(CommunicatorPtr communicator);
void remove_communicator(void* handle);

} // namespace fakegpu::nccl
