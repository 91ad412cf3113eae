"""Rank 1 forks its DataLoader's workers while it holds a lock that they need."""

import os
import threading

import earlier_calls
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

cache_lock = threading.Lock()


class Samples(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        with cache_lock:
            return torch.full((16,), float(index))


def train(loader):
    for batch in loader:  # PLANTED
        dist.all_reduce(batch.mean())


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    loader = DataLoader(Samples(), batch_size=4, num_workers=1, multiprocessing_context="fork")
    dist.barrier()
    if rank == 1:
        with cache_lock:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            train(loader)
    else:
        train(loader)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
