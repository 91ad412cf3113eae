"""Rank 0's first send to rank 1 makes a communicator of these two, and rank 1 is in its own code."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def read_samples():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    time.sleep(600)  # PLANTED


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    earlier_calls.make()
    rank = dist.get_rank()
    hidden, loss = torch.ones(64).to("cuda"), torch.ones(4).to("cuda")
    dist.all_reduce(loss)
    loss[0].item()
    if rank == 0:
        dist.send(hidden, dst=1)
    if rank == 1:
        read_samples()
        dist.recv(hidden, src=0)
    dist.all_reduce(loss)
    loss[0].item()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
