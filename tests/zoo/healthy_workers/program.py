"""DataLoader workers by fork and by spawn, a subprocess that imports torch, and a long-lived child: none is a rank."""

import multiprocessing
import subprocess
import sys
import time

import earlier_calls
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.full((16,), float(index))


def log_in_background():
    time.sleep(600)


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    background = multiprocessing.get_context("fork").Process(target=log_in_background, daemon=True)
    background.start()
    tool = subprocess.Popen([sys.executable, "-c", "import torch, time; time.sleep(6)"])
    for how in ("fork", "spawn"):
        for batch in DataLoader(Samples(), batch_size=4, num_workers=2, multiprocessing_context=how):
            dist.all_reduce(batch.mean())
    assert tool.wait() == 0
    dist.barrier()
    background.terminate()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
