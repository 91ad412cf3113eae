"""Rank 2 is stopped, as by a debugger or by a scheduler that suspends it."""

import os
import signal

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(10):
        if rank == 2 and step == 5:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            os.kill(os.getpid(), signal.SIGSTOP)  # PLANTED
        dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
