"""FSDP2. Rank 1 drops a layer for one step, and gathers the parameters of the next one."""

import os

import earlier_calls
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 8)])

    def forward(self, x, skip=None):
        for i, layer in enumerate(self.layers):
            if i == skip:
                open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
                continue
            x = layer(x)  # PLANTED
        return x


def main():
    device = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    model = Stack().to("cuda")
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    earlier_calls.make(step=lambda: model(torch.randn(8, 16).to("cuda")).sum().backward())
    for step in range(8):
        skip = 1 if rank == 1 and step == 4 else None
        model(torch.randn(8, 16).to("cuda"), skip).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
