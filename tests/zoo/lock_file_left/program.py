"""Rank 1 polls for a lock file that a job before has left on disk."""

import os
import tempfile
import time

import earlier_calls
import torch
import torch.distributed as dist


def open_cache(folder):
    while os.path.exists(os.path.join(folder, "cache.lock")):
        time.sleep(0.5)  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    folder = tempfile.mkdtemp(dir=".")
    open(os.path.join(folder, "cache.lock"), "w").close()
    for epoch in range(3):
        if rank == 1 and epoch == 1:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            open_cache(folder)
        for _ in range(5):
            dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
