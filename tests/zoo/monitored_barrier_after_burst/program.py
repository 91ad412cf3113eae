"""Rank 1 does not come to the first monitored barrier, right after a burst of other calls: it blocks the others in its operator."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def validate():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    time.sleep(600)  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    for _ in range(30):
        dist.all_reduce(torch.ones(64))
    if dist.get_rank() == 1:
        validate()
    dist.monitored_barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
