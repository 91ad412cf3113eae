"""Rank 1 is killed right after a collective. Rank 0 complains of the lost connection before that end was seen."""

import os
import signal
import time

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    for step in range(60):
        dist.all_reduce(torch.ones(4))
        time.sleep(0.1)
        if dist.get_rank() == 1 and step == 40:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
