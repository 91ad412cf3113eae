"""Trains; rank 2 finds no batch while the file HANG exists, and all end when FINISH does."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

FOLDER = Path(os.environ["DASHBOARD_FOLDER"])


def load_batch() -> torch.Tensor:
    while dist.get_rank() == 2 and (FOLDER / "HANG").exists():
        time.sleep(0.05)  # PLANTED
    return torch.ones(8)


def main() -> None:
    dist.init_process_group("gloo")
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    finish = torch.zeros(1)
    while not finish:
        model(load_batch()).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)
        finish.fill_(float((FOLDER / "FINISH").exists()))
        dist.all_reduce(finish)  # all at the same step
    os._exit(0)


main()
