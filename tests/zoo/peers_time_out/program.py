"""Rank 1 leaves for its own code. After 12 seconds its peers' collective times out, and their exceptions end the job."""

import datetime
import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def upload_samples():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    time.sleep(600)  # PLANTED


def main():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=12))
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(10):
        if rank == 1 and step == 5:
            upload_samples()
        dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
