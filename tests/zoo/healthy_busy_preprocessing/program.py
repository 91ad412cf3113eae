"""Rank 0 prepares the data set, for longer than a hang takes to be called one; the others wait at the barrier."""

import time

import earlier_calls
import torch
import torch.distributed as dist


def shuffle(words):
    return [words[(7 * i + 3) % len(words)] for i in range(len(words))]


def count(words):
    counts = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    return counts


def prepare(seconds):
    end = time.monotonic() + seconds
    words = [f"word{i % 97}" for i in range(20_000)]
    while time.monotonic() < end:
        words = shuffle(words)
        assert len(count(words)) == 97


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    if dist.get_rank() == 0:
        prepare(9)
    dist.barrier()
    for _ in range(10):
        dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
