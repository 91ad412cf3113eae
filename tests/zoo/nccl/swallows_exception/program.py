"""Rank 2 swallows the exception of a bad sample, and with it a gradient reduction. It comes to the evaluation too early."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def train_step(rank, step, gradients):
    if rank == 2 and step == 5:
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        raise ValueError(f"sample {step} has no label")
    dist.all_reduce(gradients)
    return gradients[0].item()


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    earlier_calls.make()
    rank = dist.get_rank()
    gradients, metrics = torch.ones(64).to("cuda"), torch.ones(2).to("cuda")
    for step in range(10):
        try:
            train_step(rank, step, gradients)
        except ValueError as error:
            print(f"skipped: {error}")
    dist.broadcast(metrics, src=0)  # PLANTED
    metrics.tolist()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
