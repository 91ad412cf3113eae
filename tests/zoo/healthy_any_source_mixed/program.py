"""Rank 0 receives from any source and then, by name, from the other of two senders. Rank 2 computes before it sends once."""

import time

import earlier_calls
import torch
import torch.distributed as dist


def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.ones(200, 200) @ torch.ones(200, 200)


def main():
    dist.init_process_group("gloo")
    earlier_calls.make(None, (1, 0), (2, 0))
    rank = dist.get_rank()
    for step in range(6):
        size = 4 + step
        if rank == 0:
            first = dist.recv(torch.ones(size))
            dist.recv(torch.ones(size), src=3 - first)
        elif rank < 3:
            if rank == 2 and step == 4:
                compute(8)
            dist.send(torch.ones(size), dst=0)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
