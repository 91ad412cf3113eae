"""Rank 0 waits for its isend of a large message to rank 1, which waits for a queue before its receive."""

import os
import queue

import earlier_calls
import torch
import torch.distributed as dist


def take_slot():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    queue.Queue().get()  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make(None, (0, 1))
    rank = dist.get_rank()
    for step in range(6):
        if rank == 0:
            dist.isend(torch.ones(1 << 22), dst=1).wait()
        elif rank == 1:
            if step == 4:
                take_slot()
            dist.recv(torch.ones(1 << 22), src=0)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
