// Sends and receives: all of one group progress together, each in pieces through the mailbox of its pair of ranks.
//
// A send ends when its receiver has taken everything: no buffering, as with large messages on a real device.
#include "nccl.h"

#include <algorithm>
#include <cstring>

namespace fakegpu::nccl {

namespace {

struct Transfer {
    const Operation* operation;
    size_t bytes;
    size_t moved = 0;
    bool is_done = false;
    bool is_stuck = false; // the two sides disagree about the size
};

bool advance_send(Communicator& communicator, Transfer& transfer) {
    Mailbox& box = communicator.segment->mailbox(communicator.rank, transfer.operation->root);
    if (box.is_full) return false;
    if (transfer.moved == transfer.bytes) {
        transfer.is_done = true; // the receiver has emptied the last piece
        return true;
    }
    const size_t length = std::min(kMailBytes, transfer.bytes - transfer.moved);
    const auto* input = static_cast<const char*>(transfer.operation->input);
    std::memcpy(communicator.segment->mail(communicator.rank, transfer.operation->root), input + transfer.moved, length);
    box.total = transfer.bytes;
    box.length = length;
    transfer.moved += length;
    box.is_full = 1;
    communicator.segment->notify();
    return true;
}

bool advance_receive(Communicator& communicator, Transfer& transfer) {
    Mailbox& box = communicator.segment->mailbox(transfer.operation->root, communicator.rank);
    if (!box.is_full) return false;
    if (box.total != transfer.bytes) {
        transfer.is_stuck = !is_garbage_on_mismatch();
        transfer.is_done = is_garbage_on_mismatch();
        if (transfer.is_done) box.is_full = 0;
        return true;
    }
    auto* output = static_cast<char*>(transfer.operation->output);
    std::memcpy(output + transfer.moved, communicator.segment->mail(transfer.operation->root, communicator.rank), box.length);
    transfer.moved += box.length;
    transfer.is_done = transfer.moved == transfer.bytes;
    box.is_full = 0;
    communicator.segment->notify();
    return true;
}

bool advance(Communicator& communicator, Transfer& transfer) {
    if (transfer.is_done || transfer.is_stuck) return false;
    const bool is_send = transfer.operation->kind == Kind::send;
    return is_send ? advance_send(communicator, transfer) : advance_receive(communicator, transfer);
}

// Several transfers between one pair of ranks go one after the other, as their messages share one mailbox.
bool is_behind_another(const std::vector<Transfer>& transfers, size_t index) {
    const Operation& mine = *transfers[index].operation;
    for (size_t i = 0; i < index; ++i) {
        const Operation& other = *transfers[i].operation;
        if (!transfers[i].is_done && other.kind == mine.kind && other.root == mine.root) return true;
    }
    return false;
}

} // namespace

void run_point_to_point(Communicator& communicator, const std::vector<Operation>& operations) {
    std::vector<Transfer> transfers;
    for (const Operation& operation : operations) {
        transfers.push_back(Transfer{&operation, operation.count * element_size(operation.dtype)});
        transfers.back().is_done = transfers.back().bytes == 0;
    }
    wait_for_peers(communicator, [&] {
        bool is_all_done = false;
        for (bool has_moved = true; has_moved;) {
            has_moved = false;
            is_all_done = true;
            for (size_t i = 0; i < transfers.size(); ++i) {
                if (!is_behind_another(transfers, i)) has_moved |= advance(communicator, transfers[i]);
                is_all_done &= transfers[i].is_done;
            }
        }
        return is_all_done;
    });
}

} // namespace fakegpu::nccl
