"""Two-way data parallel, three-way tensor parallel. Rank 4 reduces its gradients over its tensor-parallel group."""

import os

import earlier_calls
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
    earlier_calls.make(tp, dp)
    for step in range(10):
        mistaken = dist.get_rank() == 4 and step == 5
        dist.all_reduce(torch.ones(32), group=tp)
        if mistaken:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        dist.all_reduce(torch.ones(64), group=tp if mistaken else dp)  # PLANTED
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
