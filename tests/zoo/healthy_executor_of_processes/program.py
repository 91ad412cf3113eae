"""Rank 0 waits for the processes of an executor, which compute for long; its peers wait at the barrier."""

import concurrent.futures
import multiprocessing
import time

import earlier_calls
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
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(2, context) as executor:
            list(executor.map(tokenize, [10, 2]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
