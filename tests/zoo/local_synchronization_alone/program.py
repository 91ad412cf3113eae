"""Rank 1 never comes to a group that its members alone make: rank 0 waits in new_group, and ranks 2 and 3 for it in an all-reduce."""

import os
import threading

import earlier_calls
import torch
import torch.distributed as dist


def load_weights():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    threading.Event().wait()  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    if rank == 1:
        load_weights()
    if rank < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
