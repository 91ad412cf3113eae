"""Somebody presses Ctrl-C in the middle of a training."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    for step in range(6000):
        dist.all_reduce(torch.ones(64))
        time.sleep(0.1)
        if step == 10:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
