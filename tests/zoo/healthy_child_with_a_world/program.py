"""Rank 0 has a child evaluate, which makes a process group of its own, ends, and leaves its parent to go on a while later."""

import subprocess
import sys
import time

import torch
import torch.distributed as dist

EVALUATION = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(20):
    dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
"""


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for step in range(30):
        if step == 10 and rank == 0:
            child = subprocess.Popen([sys.executable, "-c", EVALUATION])
        if step == 20 and rank == 0:
            child.wait()
            time.sleep(2.5)
        dist.all_reduce(torch.ones(8))
        time.sleep(0.2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
