"""FSDP2. Between two steps every rank evaluates on its own, for longer than a hang takes to be called one."""

import time

import earlier_calls
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def evaluate():
    time.sleep(7)


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    earlier_calls.make(mesh.get_group(), step=lambda: model(torch.randn(8, 16)).sum().backward())
    for step in range(6):
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            evaluate()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
