"""The peak device memory of a DDP training with large activations: `training_memory.py STEPS MB`, on each rank.

Prints {"peak_mb": …, "recorder": "none" | "native" | "python"} on rank 0. The garbage collector runs as Python has it by
default: what is part of a reference cycle stays for many steps.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH = 256


class Model(nn.Module):
    """The main thread broadcasts a buffer in each forward, autograd's thread reduces gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result


def train_step(model: nn.Module, rows: int) -> None:
    activations = torch.empty(rows, WIDTH, device="cuda")
    loss = model(activations).sum()
    loss.backward()
    model.zero_grad()


def find_recorder() -> str:
    rank = sys.modules.get("hangwatch.agent.recorder.installation")
    current = rank.current_rank if rank is not None else None
    return "none" if current is None else "native" if current.recorder.native else "python"


def main() -> None:
    steps, activation_mb = map(int, sys.argv[1:])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model = DistributedDataParallel(Model().to("cuda"), device_ids=[torch.cuda.current_device()])
    for _ in range(steps):
        train_step(model, (activation_mb << 20) // (4 * WIDTH))
    torch.cuda.synchronize()
    if dist.get_rank() == 0:
        peak_mb = torch.cuda.max_memory_allocated() / (1 << 20)
        print(json.dumps({"peak_mb": peak_mb, "recorder": find_recorder()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
