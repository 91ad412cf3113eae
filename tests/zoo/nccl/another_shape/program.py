"""Rank 2's last batch is smaller, and so is the tensor that it reduces."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(10):
        size = 24
        if rank == 2 and step == 9:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            size = 17
        logits = torch.ones(size, 8).to("cuda")
        dist.all_reduce(logits)  # PLANTED
        torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
