"""DDP that reduces its gradients in every fourth step only."""

import os
import time
from contextlib import nullcontext

import earlier_calls
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    device = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    model = DistributedDataParallel(nn.Linear(16, 4).to("cuda"), device_ids=[device])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    earlier_calls.make(step=lambda: model(torch.randn(8, 16).to("cuda")).sum().backward())
    for step in range(40):
        is_last = step % 4 == 3
        with nullcontext() if is_last else model.no_sync():
            model(torch.randn(8, 16).to("cuda")).square().mean().backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        time.sleep(0.05)
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
