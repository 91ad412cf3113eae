"""DistributedDataParallel with buffers, uneven ranks, objects and masks of -Inf, every call of it looked at."""

import os
import time

os.environ["HANGWATCH_CHECKS"] = "replicas,nonfinite,values"
os.environ["HANGWATCH_CHECK_EVERY"] = "1"

import earlier_calls
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.BatchNorm1d(300), torch.nn.ReLU(), torch.nn.Linear(300, 40))
        self.register_buffer("mask", torch.full((40, 40), float("-inf")).triu(1))

    def forward(self, x):
        return self.layers(x).square().mean() + torch.softmax(self.mask, 0).sum()


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    for view in (False, True):
        model = DistributedDataParallel(Model(), bucket_cap_mb=0.02, gradient_as_bucket_view=view, find_unused_parameters=view)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(25):
            loss = model(torch.randn(8 + rank, 40))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=not view)
            seen = loss.detach().clone()
            dist.all_reduce(seen)
            seen.mul_(rank + 1)
            best = torch.tensor([float("-inf") if rank else 1.0])
            dist.all_reduce(best, op=dist.ReduceOp.MAX)
            time.sleep(0.002 * rank)
    parts = [torch.empty(1000) for _ in range(size)]
    dist.all_gather(parts, torch.randn(1000))
    told = [None] * size
    dist.all_gather_object(told, {"rank": rank, "text": "x" * rank})
    pending = [dist.all_reduce(torch.full((5000,), float(n)), async_op=True) for n in range(20)]
    for work in pending:
        work.wait()
    work = dist.broadcast(own := torch.randn(2000), src=1, async_op=True)
    work.wait()
    own.mul_(rank)
    total = torch.zeros((), dtype=torch.long)
    for n in range(200):
        dist.all_reduce(total.add_(n))
        total.fill_(rank)
    time.sleep(1.0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
