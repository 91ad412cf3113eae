"""Rank 0 waits for a pool of the package multiprocess, as the datasets library makes one, whose workers compute for long."""

import time

import earlier_calls
import multiprocess
import torch.distributed as dist


def tokenize(seconds):
    end, words = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        words += len(f"word {words}".split())
    return words


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    if dist.get_rank() == 0:
        with multiprocess.get_context("fork").Pool(2) as pool:
            pool.map(tokenize, [12, 12])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
