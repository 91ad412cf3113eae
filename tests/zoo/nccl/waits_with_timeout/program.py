"""The hosts wait for each reduction with a time limit of their own, which blocks them; rank 1 is in its own code."""

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
    dist.init_process_group("nccl")
    earlier_calls.make()
    rank = dist.get_rank()
    loss = torch.ones(64).to("cuda")
    for step in range(10):
        if rank == 1 and step == 5:
            upload_samples()
        dist.all_reduce(loss, async_op=True).wait(timedelta(seconds=60))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
