"""DDP. Rank 2 drops a batch without a backward pass, and its next forward meets its peers' gradient reduction."""

import os

import earlier_calls
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    earlier_calls.make(step=lambda: model(torch.randn(8, 16)).sum().backward())
    for step in range(10):
        inputs = torch.randn(8, 16)
        loss = model(inputs).square().mean()  # PLANTED
        if rank == 2 and step == 5:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
