"""A worker of rank 3's DataLoader reads from storage that does not answer."""
import os
import time

import earlier_calls
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if self.rank == 3 and index == 20:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            time.sleep(600)
        return torch.full((16,), float(index))


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    loader = DataLoader(Samples(dist.get_rank()), batch_size=4, num_workers=1)
    for batch in loader:  # PLANTED
        dist.all_reduce(batch.mean())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
