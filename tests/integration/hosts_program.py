"""Trains for as long as it may, in steps as uneven as they come; the rank that LEAVES names goes
off into code of its own.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist


def upload_samples() -> None:
    open(os.environ["PLANTED_AT"], "a").close()
    time.sleep(600)


def main() -> None:
    dist.init_process_group("gloo")
    rank, leaves = dist.get_rank(), int(os.environ.get("LEAVES", "-1"))
    step = 0
    while True:
        step += 1
        if step % 8 == rank:
            time.sleep(0.3)
        if rank == leaves and step == 20:
            upload_samples()
        dist.all_reduce(torch.ones(1024))
        time.sleep(0.02)


if __name__ == "__main__":
    main()
