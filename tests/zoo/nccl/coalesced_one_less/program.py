"""One of rank 1's parameters has no gradient, and its coalesced reduction has one tensor less."""

import os

import earlier_calls
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager


def average(gradients):
    with _coalescing_manager(device=torch.device("cuda", torch.cuda.current_device())):  # PLANTED
        for gradient in gradients:
            dist.all_reduce(gradient)


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    gradients = [torch.ones(size).to("cuda") for size in (64, 32, 16)]
    earlier_calls.make(step=lambda: average(gradients))
    for step in range(10):
        if rank == 1 and step == 5:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            average(gradients[:2])
        else:
            average(gradients)
        gradients[0][0].item()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
