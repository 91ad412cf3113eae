"""Started by hand as ``RANK=… python``. Rank 0 goes off into code of its own."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def render_samples():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    time.sleep(600)  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    for step in range(10):
        if dist.get_rank() == 0 and step == 5:
            render_samples()
        dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
