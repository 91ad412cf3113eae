"""FSDP2 with a sharded checkpoint by torch.distributed.checkpoint, saved, saved asynchronously and loaded again."""

import os
import tempfile

import earlier_calls
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    earlier_calls.make(mesh.get_group())
    place = [tempfile.mkdtemp(dir=".") if rank == 0 else None]
    dist.broadcast_object_list(place, src=0)
    for step in range(4):
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=os.path.join(place[0], str(step)))
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=os.path.join(place[0], "1"))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
