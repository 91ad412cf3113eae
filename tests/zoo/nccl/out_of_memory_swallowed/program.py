"""Rank 1 runs out of memory, drops the batch and with it the reduction of its gradients, and comes to the metrics too early."""

import os

import device_faults
import earlier_calls
import torch
import torch.distributed as dist


def train_step(rank, step, gradients):
    if rank == 1 and step == 5:
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        device_faults.fill_memory()
    activations = torch.empty(1 << 26, device="cuda")
    dist.all_reduce(gradients)
    del activations
    torch.cuda.empty_cache()


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    earlier_calls.make()
    rank = dist.get_rank()
    gradients, metrics = torch.ones(64).to("cuda"), torch.ones(2).to("cuda")
    for step in range(8):
        try:
            train_step(rank, step, gradients)
        except torch.OutOfMemoryError:
            print(f"rank {rank} drops batch {step}")
        dist.broadcast(metrics, src=0)  # PLANTED
        metrics.tolist()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
