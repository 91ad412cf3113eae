"""DDP. Rank 0 evaluates with the wrapped model, whose forward broadcasts its buffers; the others are at the barrier."""

import os

import earlier_calls
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    earlier_calls.make(step=lambda: model(torch.randn(8, 16)).sum().backward())
    for epoch in range(3):
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
        if epoch == 1:
            if dist.get_rank() == 0:
                open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
                model(torch.randn(8, 16))  # PLANTED
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
