"""Rank 1 does not come to a monitored barrier, whose own timeout is half an hour away."""

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
    for step in range(6):
        dist.all_reduce(torch.ones(64))
        if dist.get_rank() == 1 and step == 4:
            validate()
        dist.monitored_barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
