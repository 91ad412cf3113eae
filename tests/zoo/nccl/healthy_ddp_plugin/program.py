"""DDP."""

import os
import time

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
    network = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)).to("cuda")
    model = DistributedDataParallel(network, device_ids=[device])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    earlier_calls.make(step=lambda: model(torch.randn(8, 16).to("cuda")).sum().backward())
    for _ in range(40):
        optimizer.zero_grad()
        model(torch.randn(8, 16).to("cuda")).square().mean().backward()
        optimizer.step()
        time.sleep(0.05 * (rank + 1) / 4)
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
