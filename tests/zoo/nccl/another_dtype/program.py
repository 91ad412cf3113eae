"""Rank 3 left mixed precision off, and reduces float32 where the others reduce bfloat16."""

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
        dtype = torch.bfloat16
        if rank == 3 and step == 5:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            dtype = torch.float32
        gradients = torch.ones(256, dtype=dtype).to("cuda")
        dist.all_reduce(gradients)  # PLANTED
        torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
