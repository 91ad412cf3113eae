"""Rank 0 computes for long before it writes the file for which its peers poll. Between two files no rank is in a call."""

import os
import tempfile
import time

import earlier_calls
import torch
import torch.distributed as dist


def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.ones(200, 200) @ torch.ones(200, 200)


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    places = [tempfile.mkdtemp(dir=".") if rank == 0 else None]
    dist.broadcast_object_list(places, 0)
    for step in range(4):
        done = os.path.join(places[0], str(step))
        if rank == 0:
            if step == 2:
                compute(14)
            open(done, "w").close()
        while not os.path.exists(done):
            time.sleep(0.1)
        dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
