"""Two-way tensor parallel, four-way data parallel. Rank 5 stalls; its tensor-parallel peer waits for it, and through the
data-parallel groups so does everybody else."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def load_expert():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    time.sleep(600)  # PLANTED


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    earlier_calls.make(mesh["tp"].get_group(), mesh["dp"].get_group())
    activations, gradients = torch.ones(32), torch.ones(64)
    for step in range(10):
        if dist.get_rank() == 5 and step == 5:
            load_expert()
        dist.all_reduce(activations, group=mesh["tp"].get_group())
        dist.all_reduce(gradients, group=mesh["dp"].get_group())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
