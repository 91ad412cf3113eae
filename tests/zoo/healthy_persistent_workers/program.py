"""DataLoader workers that live from epoch to epoch, sleep between them, and block no rank."""

import time

import earlier_calls
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Samples(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.full((16,), float(index))


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    samples = Samples()
    sampler = DistributedSampler(samples)
    loader = DataLoader(samples, batch_size=4, sampler=sampler, num_workers=2, persistent_workers=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch in loader:
            dist.all_reduce(batch.mean())
        time.sleep(1.5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
