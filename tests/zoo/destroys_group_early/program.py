"""Rank 3 stops early, destroys its process group and goes on to export the model. The others still train."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def export_model():
    time.sleep(600)


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(20):
        if rank == 3 and step == 12:
            break
        time.sleep(0.05)
        dist.all_reduce(torch.ones(64))
    if rank == 3:
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    dist.destroy_process_group()
    if rank == 3:
        export_model()


if __name__ == "__main__":
    main()
