"""Rank 3 has one batch less, destroys its process group and goes on to export its model."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def export(model):
    time.sleep(600)


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    earlier_calls.make()
    rank = dist.get_rank()
    loss = torch.ones(64).to("cuda")
    batches = 29 if rank == 3 else 30
    for _ in range(batches):
        dist.all_reduce(loss)
        loss[0].item()
    if rank == 3:
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    dist.destroy_process_group()
    export(loss)


if __name__ == "__main__":
    main()
