"""The training runs in a thread. The one of rank 1 tokenizes a long document in Python while the others wait, and its main thread sleeps."""

import os
import threading
import time

import earlier_calls
import torch
import torch.distributed as dist


def tokenize(seconds):
    end = time.monotonic() + seconds
    count = 0
    while time.monotonic() < end:
        count += len("".join(chr(97 + i % 26) for i in range(1024)).split("a"))
    return count


def train(rank):
    earlier_calls.make()
    for step in range(10):
        if rank == 1 and step == 5:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            tokenize(12)
        dist.all_reduce(torch.ones(64))


def main():
    dist.init_process_group("gloo")
    thread = threading.Thread(target=train, args=(dist.get_rank(),))
    thread.start()
    thread.join()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
