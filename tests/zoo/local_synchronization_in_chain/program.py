"""Neighbours make groups of their own, the even pairs before the odd one. Rank 3 stalls before its first group."""

import os
import queue

import earlier_calls
import torch
import torch.distributed as dist


def load_weights():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    queue.Queue().get()  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    if rank == 3:
        load_weights()
    for first in (0, 2, 1):
        if rank in (first, first + 1):
            pair = dist.new_group([first, first + 1], use_local_synchronization=True)
            dist.all_reduce(torch.ones(4), group=pair)
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
