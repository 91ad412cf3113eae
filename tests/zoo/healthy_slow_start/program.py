"""Ranks come to init_process_group seconds apart, as when a container image is pulled on one node only."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def main():
    time.sleep(1.5 * int(os.environ["RANK"]))
    dist.init_process_group("gloo")
    earlier_calls.make()
    for _ in range(20):
        dist.all_reduce(torch.ones(64))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
