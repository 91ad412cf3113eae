"""Rank 1 is killed without a word, as the kernel does when memory runs out."""

import os
import signal
import time

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(100):
        if rank == 1 and step == 30:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.1)
        dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
