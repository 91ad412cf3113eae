"""A ring of batches: each rank sends to the next one and receives from the one before it. Rank 2 stalls before its batch."""

import os
import threading

import earlier_calls
import torch
import torch.distributed as dist


def load_block():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    threading.Event().wait()  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank, size = dist.get_rank(), dist.get_world_size()
    out, into = torch.ones(1 << 20), torch.ones(1 << 20)
    for step in range(20):
        if rank == 2 and step == 8:
            load_block()
        operations = [
            dist.P2POp(dist.isend, out, (rank + 1) % size),
            dist.P2POp(dist.irecv, into, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
