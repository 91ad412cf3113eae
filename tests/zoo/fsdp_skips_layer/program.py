"""FSDP2. Rank 1 drops a layer for one step, and gathers the parameters of the next one."""

import os

import earlier_calls
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
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
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Stack()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    earlier_calls.make(mesh.get_group(), step=lambda: model(torch.randn(8, 16)).sum().backward())
    for step in range(8):
        skip = 1 if rank == 1 and step == 4 else None
        loss = model(torch.randn(8, 16), skip).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
