"""Rank 1 is in its own code. Nothing in the others' loop waits for the device, so their hosts go on issuing calls."""

import os
import time

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
    for step in range(3000):
        if rank == 1 and step == 50:
            upload_samples()
        time.sleep(0.02)
        dist.all_reduce(loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
