"""Finalizers that leave a group run in every rank at the same step, by garbage collection."""

import gc

import earlier_calls
import torch
import torch.distributed as dist


class Timer:
    def __init__(self):
        self.itself = self

    def __del__(self):
        dist.barrier()


def main():
    gc.disable()
    dist.init_process_group("gloo")
    earlier_calls.make()
    for step in range(20):
        Timer()
        if step % 5 == 4:
            gc.collect()
        dist.all_reduce(torch.ones(8))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
