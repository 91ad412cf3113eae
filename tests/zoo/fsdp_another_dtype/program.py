"""FSDP2. Rank 2 was started with mixed precision, and gathers bfloat16 parameters where its peers gather float32."""

import os

import earlier_calls
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    earlier_calls.make(mesh.get_group())
    model = nn.Sequential(nn.Linear(16, 30), nn.ReLU(), nn.Linear(30, 6))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if dist.get_rank() == 2 else MixedPrecisionPolicy()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    dist.barrier()  # a rank that gloo ends before it made its call has no vote on which dtype is the odd one
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    for _ in range(8):
        model(torch.randn(8, 16)).square().mean().backward()  # PLANTED
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
