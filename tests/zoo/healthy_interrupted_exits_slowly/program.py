"""Somebody presses Ctrl-C. Rank 0 writes a checkpoint as it exits, while rank 1 still waits for it in native code."""

import atexit
import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    if dist.get_rank() == 0:
        atexit.register(time.sleep, 2.0)
    for step in range(6000):
        if dist.get_rank() == 0:
            time.sleep(0.2)
        dist.all_reduce(torch.ones(64))
        if step == 10:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
