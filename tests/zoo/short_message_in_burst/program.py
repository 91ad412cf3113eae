"""Rank 0 sends 3,000 quick messages to rank 1. One of them is shorter than what rank 1 receives."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for number in range(3000):
        if rank == 0:
            size = 64
            if number == 1500:
                open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
                size = 48
            dist.send(torch.ones(size), dst=1)  # PLANTED
        else:
            dist.recv(torch.ones(64), src=0)
    dist.barrier()


if __name__ == "__main__":
    main()
