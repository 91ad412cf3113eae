"""Rank 2 is killed while it waits, as are others, for a checkpoint of rank 0."""

import os
import signal
import threading
import time

import earlier_calls
import torch
import torch.distributed as dist


def run_out_of_memory():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    os.kill(os.getpid(), signal.SIGKILL)


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for _ in range(10):
        dist.all_reduce(torch.ones(64))
    if rank == 0:
        time.sleep(3)
    if rank == 2:
        threading.Timer(1.0, run_out_of_memory).start()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
