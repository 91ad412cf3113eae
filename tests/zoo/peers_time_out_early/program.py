"""Rank 0 waits for an item that nobody puts into its queue. Its peers' collective times out long before the wait counts as a hang."""

import datetime
import os
import queue

import earlier_calls
import torch
import torch.distributed as dist


def next_batch(inbox):
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    return inbox.get()  # PLANTED


def main():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
    earlier_calls.make()
    rank = dist.get_rank()
    inbox = queue.Queue()
    for step in range(10):
        if rank == 0 and step == 5:
            next_batch(inbox)
        dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
