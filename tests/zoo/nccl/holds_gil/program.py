"""Rank 1 calls a native library that keeps the GIL."""

import ctypes
import os

import earlier_calls
import torch
import torch.distributed as dist


def tokenize():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    ctypes.PyDLL(None).sleep(600)  # PLANTED


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    earlier_calls.make()
    rank = dist.get_rank()
    loss = torch.ones(64).to("cuda")
    for step in range(10):
        if rank == 1 and step == 5:
            tokenize()
        dist.all_reduce(loss)
        loss[0].item()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
