"""Rank 0 restores a checkpoint for long and has declared it; the others wait for its broadcast."""

import time

import earlier_calls
import torch
import torch.distributed as dist

import hangwatch


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    weights = torch.ones(64)
    if dist.get_rank() == 0:
        with hangwatch.phase("restore", limit=60):
            time.sleep(8)
    dist.broadcast(weights, src=0)
    for step in range(10):
        dist.all_reduce(weights)
        hangwatch.step(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
