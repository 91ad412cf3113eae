"""A worker of rank 0's DataLoader is killed, as when memory runs out; torch raises an
exception wherever the training loop is at that moment."""

import os
import signal
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
        if self.rank == 0 and index == 20:
            time.sleep(0.5)  # the loop has taken what came before: else it may be another exception, of the connection
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((16,), float(index))


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    loader = DataLoader(Samples(dist.get_rank()), batch_size=4, num_workers=1)
    for batch in loader:
        dist.all_reduce(batch.mean())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
