"""A job of one rank, with a pause longer than a hang takes to be called one."""

import time

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    for step in range(20):
        dist.all_reduce(torch.ones(64))
        if step == 10:
            time.sleep(6)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
