"""Rank 2 does not come to the making of a group with rank 0, and reads its part of the data from storage that does not answer."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def read_index():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    time.sleep(600)  # PLANTED


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    earlier_calls.make()
    rank = dist.get_rank()
    loss = torch.ones(64).to("cuda")
    dist.all_reduce(loss)
    loss[0].item()
    if rank == 2:
        read_index()
    pair = dist.new_group([0, 2])
    if rank in (0, 2):
        dist.all_reduce(loss, group=pair)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
