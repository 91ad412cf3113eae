"""Rank 2 is in its own code. After 12 seconds its peers' watchdogs time out and end them; they are no culprits."""

import os
import time
from datetime import timedelta

import earlier_calls
import torch
import torch.distributed as dist


def upload_samples():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    time.sleep(600)  # PLANTED


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=timedelta(seconds=12))
    earlier_calls.make()
    rank = dist.get_rank()
    loss = torch.ones(64).to("cuda")
    for step in range(10):
        if rank == 2 and step == 5:
            upload_samples()
        dist.all_reduce(loss)
        loss[0].item()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
