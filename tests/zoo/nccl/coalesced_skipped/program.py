"""Rank 1 leaves out one coalesced reduction of its gradients."""

import os

import earlier_calls
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager


def average(gradients):
    with _coalescing_manager(device=torch.device("cuda", torch.cuda.current_device())):
        for gradient in gradients:
            dist.all_reduce(gradient)


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    gradients = [torch.ones(size).to("cuda") for size in (64, 32, 16)]
    earlier_calls.make(step=lambda: average(gradients))
    rate = torch.ones(1).to("cuda")
    for step in range(10):
        if rank == 1 and step == 5:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        else:
            average(gradients)
        dist.broadcast(rate, src=0)  # PLANTED
        rate.item()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
