"""Rank 1 alone is interrupted, and does not end: what it does at its exit takes forever."""

import atexit
import os
import signal
import time

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    if dist.get_rank() == 1:
        atexit.register(time.sleep, 600)
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        os.kill(os.getpid(), signal.SIGINT)  # PLANTED
    dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
