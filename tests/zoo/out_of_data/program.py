"""Rank 2's shard is one batch shorter: it returns while the others reduce their last batch."""

import os

import earlier_calls
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    shard = TensorDataset(torch.ones(72 if rank == 2 else 80, 16))
    for (batch,) in DataLoader(shard, batch_size=8):
        dist.all_reduce(batch.mean())
    if rank == 2:
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()


if __name__ == "__main__":
    main()
