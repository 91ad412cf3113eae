"""Two ranks work in a group of their own for long; the others have nothing to do and wait at the barrier."""

import time

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    workers = dist.new_group([0, 1])
    earlier_calls.make(None, workers)
    if rank < 2:
        for _ in range(60):
            dist.all_reduce(torch.ones(64), group=workers)
            time.sleep(0.12)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
