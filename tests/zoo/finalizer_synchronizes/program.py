"""An object of rank 1 that synchronizes in its finalizer is freed a step earlier than those of the others, by a collection of garbage."""

import gc
import os

import earlier_calls
import torch
import torch.distributed as dist


class Timer:
    def __init__(self):
        self.itself = self

    def __del__(self):
        dist.barrier()  # PLANTED


def main():
    gc.disable()
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(20):
        if step == 3:
            Timer()
        if step == (10 if rank == 1 else 11):
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            gc.collect()
        dist.all_reduce(torch.ones(8))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
