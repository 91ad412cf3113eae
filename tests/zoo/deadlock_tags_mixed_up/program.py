"""Rank 0 sends keys and then values; after some rounds rank 1 receives values first. Each waits for the other's second call."""

import os

import earlier_calls
import torch
import torch.distributed as dist

KEYS, VALUES = 1, 2


def main():
    dist.init_process_group("gloo")
    earlier_calls.make(None, (0, 1))
    rank = dist.get_rank()
    cache = torch.ones(1 << 23)
    dist.barrier()
    if rank < 2:
        for step in range(4):
            order = (KEYS, VALUES)
            if step == 3:
                open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
                order = order if rank == 0 else (VALUES, KEYS)
            for tag in order:
                dist.send(cache, dst=1, tag=tag) if rank == 0 else dist.recv(cache, src=0, tag=tag)  # PLANTED
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
