"""DDP. Rank 3's share of the data has one batch less, and it is at the barrier while the others reduce gradients."""

import os

import earlier_calls
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    device = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Linear(16, 4).to("cuda"), device_ids=[device])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    earlier_calls.make(step=lambda: model(torch.randn(8, 16).to("cuda")).sum().backward())
    for _ in range(9 if rank == 3 else 10):
        optimizer.zero_grad()
        model(torch.randn(8, 16).to("cuda")).square().mean().backward()
        optimizer.step()
    if rank == 3:
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    dist.barrier()  # PLANTED
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
