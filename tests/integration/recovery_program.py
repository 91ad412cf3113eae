"""Rank 1 leaves out one all-reduce in the first attempt; the second one trains to its end."""

import os
from pathlib import Path

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    rank = dist.get_rank()
    for step in range(20):
        gradients = torch.ones(64)
        if not (first and rank == 1 and step == 5):
            dist.all_reduce(gradients)
        else:
            Path(os.environ["PLANTED_AT"]).touch()
    if rank == 0:
        print(f"trained to step {step} with {gradients.sum().item():g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
