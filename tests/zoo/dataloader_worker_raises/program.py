"""A worker of rank 2's DataLoader meets a sample without a label; its exception comes up in the training loop."""

import os

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
        sample = {"x": torch.full((16,), float(index)), "label": index}
        if self.rank == 2 and index == 20:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            del sample["label"]
        return sample["x"], sample["label"]


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    loader = DataLoader(Samples(dist.get_rank()), batch_size=4, num_workers=1)
    for x, _ in loader:  # PLANTED
        dist.all_reduce(x.mean())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
