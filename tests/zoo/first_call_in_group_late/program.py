"""A group is made early, and its members first meet in it late: rank 2 waits on a condition instead."""

import os
import threading

import earlier_calls
import torch
import torch.distributed as dist


def await_turn():
    condition = threading.Condition()
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    with condition:
        condition.wait()  # PLANTED


def main():
    dist.init_process_group("gloo")
    group = dist.new_group([0, 2])
    earlier_calls.make()
    rank = dist.get_rank()
    if rank == 2:
        await_turn()
    if rank != 1:
        dist.all_reduce(torch.ones(8), group=group)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
