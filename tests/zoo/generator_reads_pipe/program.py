"""Rank 2 streams its samples from a pipe that has run dry and is never closed."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def stream(descriptor, rank):
    for n in range(20):
        if rank == 2 and n == 6:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            os.read(descriptor, 64)  # PLANTED
        yield torch.full((16,), float(n))


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    source = os.pipe()[0]
    for sample in stream(source, dist.get_rank()):
        dist.all_reduce(sample.mean())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
