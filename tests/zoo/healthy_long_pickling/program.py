"""Rank 0 gathers an object that takes 8 seconds to pickle, with its processor at work."""

import time

import earlier_calls
import torch
import torch.distributed as dist


class Index:
    def __getstate__(self):
        end = time.monotonic() + 8
        rows = 0
        while time.monotonic() < end:
            rows += sum(range(10_000))
        return {"rows": rows}


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(12):
        result = Index() if rank == 0 and step == 8 else step
        dist.all_gather_object([None] * 3, result)
        dist.all_reduce(torch.ones(8))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
