"""Rank 0 reads from a pipe that nobody fills before it writes a file; its peers poll for that file. No rank is in a call."""

import os
import tempfile
import time

import earlier_calls
import torch
import torch.distributed as dist


def read_samples(folder):
    path = os.path.join(folder, "samples")
    os.mkfifo(path)
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    with open(path, "rb") as pipe:  # PLANTED
        return pipe.read()


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    places = [tempfile.mkdtemp(dir=".") if rank == 0 else None]
    dist.broadcast_object_list(places, 0)
    folder = places[0]
    for step in range(10):
        done = os.path.join(folder, str(step))
        if rank == 0:
            if step == 5:
                read_samples(folder)
            open(done, "w").close()
        while not os.path.exists(done):
            time.sleep(0.1)
        dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
