"""Rank 1 tokenizes a long document in Python while the others wait. It is slow, and the job ends well."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def merge(tokens):
    return [a + b for a, b in zip(tokens[::2], tokens[1::2], strict=False)]


def tokenize(seconds):
    end = time.monotonic() + seconds
    count = 0
    while time.monotonic() < end:
        tokens = [chr(97 + i % 26) for i in range(1024)]
        while len(tokens) > 1:
            tokens = merge(tokens)
        count += len(tokens)
    return count


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(10):
        if rank == 1 and step == 5:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            tokenize(12)
        dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
