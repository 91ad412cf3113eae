"""The world's communicator is split in two (ncclCommSplit), and rank 2 is not there: it is in its own code."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def read_index():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    time.sleep(600)  # PLANTED


def main():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    earlier_calls.make()
    rank = dist.get_rank()
    loss = torch.ones(64).to("cuda")
    dist.all_reduce(loss)
    loss[0].item()
    if rank == 2:
        read_index()
    half = dist.split_group(split_ranks=[[0, 1], [2, 3]])
    dist.all_reduce(loss, group=half)
    loss[0].item()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
