"""Rank 0 opens its checkpoint for writing, and the storage does not answer. torch opens the file in native code
and keeps the GIL meanwhile, so that nothing else of rank 0 runs either."""

import os
import tempfile

import earlier_calls
import torch
import torch.distributed as dist
from torch import nn


def save_checkpoint(model, path):
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    torch.save(model.state_dict(), path)  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    model = nn.Linear(16, 4)
    path = os.path.join(tempfile.mkdtemp(dir="."), "step5.pt")
    os.mkfifo(path)  # opening it blocks until somebody reads
    for step in range(10):
        dist.all_reduce(torch.ones(64))
        if step == 5:
            if dist.get_rank() == 0:
                save_checkpoint(model, path)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
