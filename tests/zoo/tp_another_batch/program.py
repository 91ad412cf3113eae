"""Tensor parallel with DTensor. All ranks of the group must see one batch; rank 1's loader hands it a smaller one."""

import os

import earlier_calls
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(16, 36), nn.ReLU(), nn.Linear(36, 16))
    model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    earlier_calls.make(mesh.get_group(), step=lambda: model(torch.ones(8, 16)).sum().backward())
    for step in range(8):
        size = 7 if rank == 1 and step == 5 else 8
        if size == 7:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        model(torch.ones(size, 16)).sum().backward()  # PLANTED
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
