// Collectives: in rounds, each member posts a piece of its input and takes from all pieces what its output needs.
#include "nccl.h"

#include <algorithm>
#include <cstring>

namespace fakegpu::nccl {

namespace {

constexpr int kAverage = 4;
constexpr int kFirstPremultiplied = 5;

bool meet(Communicator& communicator) {
    const uint32_t target = ++communicator.barriers;
    Segment& segment = *communicator.segment;
    segment.rank(communicator.rank).arrived = target;
    segment.notify();
    return wait_for_peers(communicator, [&] {
        for (int i = 0; i < communicator.size; ++i) {
            if (segment.rank(i).arrived < target) return false;
        }
        return true;
    });
}

bool do_all_agree(Communicator& communicator) {
    const Signature& first = communicator.segment->rank(0).signature;
    for (int i = 1; i < communicator.size; ++i) {
        const Signature& other = communicator.segment->rank(i).signature;
        const bool is_same = other.kind == first.kind && other.dtype == first.dtype && other.op == first.op &&
                             other.root == first.root && other.count == first.count;
        if (!is_same) return false;
    }
    return true;
}

// How the bytes of each kind move: in `blocks` of `count` elements, of which a member posts all or none.
struct Layout {
    size_t input_bytes;
    bool is_posting;
    bool is_receiving;
};

Layout layout_of(const Communicator& communicator, const Operation& operation) {
    const size_t block = operation.count * element_size(operation.dtype);
    const size_t all = block * communicator.size;
    const bool is_root = communicator.rank == operation.root;
    switch (operation.kind) {
    case Kind::all_reduce: return {block, true, true};
    case Kind::all_gather: return {block, true, true};
    case Kind::reduce_scatter: return {all, true, true};
    case Kind::broadcast: return {block, is_root, true};
    case Kind::reduce: return {block, true, is_root};
    case Kind::all_to_all: return {all, true, true};
    case Kind::gather: return {block, true, is_root};
    case Kind::scatter: return {all, is_root, true};
    default: return {0, false, false};
    }
}

struct Piece {
    size_t offset; // in the input
    size_t length;
};

// Clips a piece to the block that is mine, and moves it to that block's beginning.
struct Clipped {
    size_t skip;
    size_t offset;
    size_t length;
};
Clipped clip(const Piece& piece, size_t block, int rank) {
    const size_t begin = std::max(piece.offset, block * rank);
    const size_t end = std::min(piece.offset + piece.length, block * (rank + 1));
    if (begin >= end) return {0, 0, 0};
    return {begin - piece.offset, begin - block * rank, end - begin};
}

void take_piece(Communicator& communicator, const Operation& operation, const Piece& piece) {
    Segment& segment = *communicator.segment;
    auto* output = static_cast<char*>(operation.output);
    const size_t width = element_size(operation.dtype);
    const size_t block = operation.count * width;
    Clipped mine{0, piece.offset, piece.length};
    const bool is_by_block = operation.kind == Kind::reduce_scatter || operation.kind == Kind::all_to_all ||
                             operation.kind == Kind::scatter;
    if (is_by_block) mine = clip(piece, block, communicator.rank);
    if (!mine.length) return;
    switch (operation.kind) {
    case Kind::all_reduce:
    case Kind::reduce:
    case Kind::reduce_scatter: {
        const int op = operation.op >= kAverage ? 0 : operation.op;
        std::memcpy(output + mine.offset, segment.slot(0) + mine.skip, mine.length);
        for (int i = 1; i < communicator.size; ++i) {
            reduce_into(output + mine.offset, segment.slot(i) + mine.skip, mine.length / width, operation.dtype, op);
        }
        double factor = 1;
        if (operation.op == kAverage) factor = 1.0 / communicator.size;
        if (operation.op >= kFirstPremultiplied) factor = operation.scalar;
        if (factor != 1) scale(output + mine.offset, mine.length / width, operation.dtype, factor);
        break;
    }
    case Kind::broadcast:
    case Kind::scatter: std::memcpy(output + mine.offset, segment.slot(operation.root) + mine.skip, mine.length); break;
    default: // all_gather, gather, all_to_all: one block from each
        for (int i = 0; i < communicator.size; ++i) {
            std::memcpy(output + block * i + mine.offset, segment.slot(i) + mine.skip, mine.length);
        }
    }
}

} // namespace

void run_collective(Communicator& communicator, const Operation& operation) {
    Segment& segment = *communicator.segment;
    const bool is_rooted = operation.kind == Kind::broadcast || operation.kind == Kind::reduce ||
                           operation.kind == Kind::gather || operation.kind == Kind::scatter;
    segment.rank(communicator.rank).signature =
        Signature{static_cast<int>(operation.kind), operation.dtype, operation.op, is_rooted ? operation.root : 0,
                  operation.count};
    if (!meet(communicator)) return;
    if (!do_all_agree(communicator)) {
        // A real device reads past its peers' data or waits for more of it.
        if (!is_garbage_on_mismatch()) {
            wait_for_peers(communicator, [] { return false; });
            return;
        }
        meet(communicator);
        return; // the output stays as it was
    }
    const Layout layout = layout_of(communicator, operation);
    const auto* input = static_cast<const char*>(operation.input);
    for (size_t offset = 0; offset < layout.input_bytes; offset += kSlotBytes) {
        const Piece piece{offset, std::min(kSlotBytes, layout.input_bytes - offset)};
        if (layout.is_posting) std::memcpy(segment.slot(communicator.rank), input + offset, piece.length);
        if (!meet(communicator)) return;
        if (layout.is_receiving) take_piece(communicator, operation, piece);
        if (!meet(communicator)) return;
    }
    // Nobody overwrites its signature for the next call before all have compared this one.
    if (!layout.input_bytes) meet(communicator);
}

} // namespace fakegpu::nccl
