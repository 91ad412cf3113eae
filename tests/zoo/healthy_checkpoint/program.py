"""Rank 0 writes a checkpoint while all others wait for it behind a barrier."""

import time

import earlier_calls
import torch
import torch.distributed as dist


def save_checkpoint():
    time.sleep(2.5)


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    for step in range(20):
        dist.all_reduce(torch.ones(64))
        if step in (8, 16):
            if dist.get_rank() == 0:
                save_checkpoint()
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
