"""Rank 0 has a child evaluate, which makes a process group of its own, ends, and leaves its parent to go on a while later."""

import subprocess
import sys
import time

import earlier_calls
import torch
import torch.distributed as dist

EVALUATION = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(20):
    dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
"""


def all_ranks_agree(vote):
    votes = torch.tensor([int(vote)])
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return bool(votes.item())


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    child = subprocess.Popen([sys.executable, "-c", EVALUATION]) if rank == 0 else None
    while not all_ranks_agree(child is None or child.poll() is not None):
        time.sleep(0.2)
    if rank == 0:
        time.sleep(2.5)
    for _ in range(10):
        dist.all_reduce(torch.ones(8))
        time.sleep(0.2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
