"""Rank 3's link is slow: each call takes 0.3 seconds more."""

import os

import device_faults
import earlier_calls
import torch
import torch.distributed as dist


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    earlier_calls.make()
    rank = dist.get_rank()
    loss = torch.ones(64).to("cuda")
    if rank == 3:
        device_faults.slow_network(300)
    for _ in range(30):
        dist.all_reduce(loss)
        loss[0].item()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
