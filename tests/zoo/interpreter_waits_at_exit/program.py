"""Rank 2 has left its loop a step early, and its interpreter waits for a thread that uploads. The others wait for rank 2."""
import os
import threading
import time

import earlier_calls
import torch
import torch.distributed as dist


def upload():
    time.sleep(600)  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    threading.Thread(target=upload).start() if rank == 2 else None
    for _ in range(9 if rank == 2 else 10):
        dist.all_reduce(torch.ones(64))
    if rank == 2:
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()


if __name__ == "__main__":
    main()
