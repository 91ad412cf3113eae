"""Rank 1 sees a batch of another size, compiles its model again, and the compiler waits for a cache that nobody fills."""

import os
import threading

import earlier_calls
import torch
import torch.distributed as dist
from torch import nn

cache_filled = threading.Event()


def backend(module, inputs):
    if any(len(i) == 7 for i in inputs):
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        cache_filled.wait()  # PLANTED
    return module.forward


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    model = torch.compile(nn.Linear(16, 4), backend=backend, dynamic=False)
    for step in range(8):
        batch = torch.ones(7 if rank == 1 and step == 5 else 8, 16)
        dist.all_reduce(model(batch).mean().detach())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
