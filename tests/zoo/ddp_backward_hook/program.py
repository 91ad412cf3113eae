"""DDP. A hook in rank 2's backward pass writes gradient norms to a pipe that nobody reads."""

import os

import earlier_calls
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pipe, norms = os.fdopen(os.pipe()[1], "wb"), []

    def log_norm(gradient):
        norms.append(gradient.norm().item())
        if rank == 2 and len(norms) == 5:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            pipe.write(bytes(1 << 20))  # PLANTED
        return gradient

    model.module[2].weight.register_hook(log_norm)
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
