"""FSDP2. Rank 1 has a batch whose attention matrix does not fit, in the middle of its peers' gathers."""

import os

import earlier_calls
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, x, length):
        scores = torch.empty(length, length)  # PLANTED
        return self.project(x) + scores[:1, :1]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = fully_shard(Attention(), mesh=mesh)
    earlier_calls.make(mesh.get_group(), step=lambda: model(torch.randn(8, 16), 8).sum().backward())
    for step in range(8):
        if rank == 1 and step == 4:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        model(torch.randn(8, 16), 1 << 24 if rank == 1 and step == 4 else 8).sum().backward()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
