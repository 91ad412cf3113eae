"""Asynchronous work is left pending behind a computation that takes its time, and a different one on each rank."""

import time

import earlier_calls
import torch
import torch.distributed as dist


def compute(seconds):
    end = time.monotonic() + seconds
    x = torch.ones(64, 64)
    while time.monotonic() < end:
        x = (x @ x).clamp(max=1)


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for _ in range(3):
        pending = [dist.all_reduce(torch.ones(1024), async_op=True) for _ in range(4)]
        compute(0.5 + 0.8 * rank)
        for work in pending:
            work.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
