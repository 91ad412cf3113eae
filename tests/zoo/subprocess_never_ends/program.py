"""Rank 0 calls a tool that never ends, between two epochs."""

import os
import subprocess

import earlier_calls
import torch
import torch.distributed as dist


def preprocess():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    subprocess.run(["sleep", "600"], check=True)  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    for epoch in range(3):
        if dist.get_rank() == 0 and epoch == 1:
            preprocess()
        dist.barrier()
        for _ in range(5):
            dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
