"""One sample of rank 2's is broken: its gradients are NaN, and after one all-reduce so is every replica."""

import os
import time

os.environ["HANGWATCH_CHECKS"] = "nonfinite"

import earlier_calls
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

AT = 20


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank, step = dist.get_rank(), 0
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters())
    total = torch.zeros(())
    while True:
        batch = torch.randn(8, 32)
        if step == AT and rank == 2:
            batch[3, 5] = float("nan")
            open(os.environ["PLANTED_AT"], "w").close()
        loss = model(batch).square().mean()
        loss.backward()  # PLANTED
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
        dist.all_reduce(total)
        total /= dist.get_world_size()
        step += 1
        time.sleep(0.03)


if __name__ == "__main__":
    main()
