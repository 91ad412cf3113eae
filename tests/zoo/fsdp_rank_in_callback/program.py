"""FSDP2. Between forward and backward, rank 1 hands its loss to a callback that does not return."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def on_loss(rank, step):
    if rank == 1 and step == 4:
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        time.sleep(600)  # PLANTED


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    earlier_calls.make(mesh.get_group(), step=lambda: model(torch.randn(8, 16)).sum().backward())
    for step in range(8):
        loss = model(torch.randn(8, 16)).square().mean()
        on_loss(rank, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
