"""Rank 1 leaves out one of its evaluation's three reductions, ends its loop before the others, and exports the model for long."""
import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def evaluate(rank, step):
    for name in ("loss", "accuracy", "recall"):
        if rank == 1 and step == 4 and name == "accuracy":
            continue
        dist.all_reduce(torch.ones(1))


def export_model():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    time.sleep(600)  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(8):
        dist.all_reduce(torch.ones(1))
        evaluate(rank, step)
    if rank == 1:
        export_model()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
