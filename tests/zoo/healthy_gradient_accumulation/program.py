"""DDP with gradient accumulation: no_sync, and a number of micro-batches of its own on each rank."""

import contextlib
import time

import earlier_calls
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    earlier_calls.make(step=lambda: model(torch.randn(8, 16)).sum().backward())
    microbatches = 2 + 2 * rank
    for _ in range(10):
        optimizer.zero_grad()
        for n in range(microbatches):
            with model.no_sync() if n < microbatches - 1 else contextlib.nullcontext():
                (model(torch.randn(8, 16)).square().mean() / microbatches).backward()
                time.sleep(0.02)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
