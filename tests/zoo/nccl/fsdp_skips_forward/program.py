"""FSDP2. Rank 1 drops an empty batch, and is at the barrier while the others gather the parameters of their last step."""

import os

import earlier_calls
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def main():
    device = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).to("cuda")
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    earlier_calls.make(step=lambda: model(torch.randn(8, 16).to("cuda")).sum().backward())
    for step in range(8):
        if rank == 1 and step == 4:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            continue
        model(torch.randn(8, 16).to("cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()  # PLANTED
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
