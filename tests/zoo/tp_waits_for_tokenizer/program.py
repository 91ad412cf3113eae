"""Tensor parallel with DTensor. Rank 1 waits for its tokenizer in another process before the forward pass."""

import multiprocessing
import os
import time

import earlier_calls
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def tokenize(results):
    time.sleep(600)


def next_batch(rank, step):
    if rank == 1 and step == 4:
        context = multiprocessing.get_context("fork")
        results = context.SimpleQueue()
        context.Process(target=tokenize, args=(results,), daemon=True).start()
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        return results.get()  # PLANTED
    return torch.ones(4, 16)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    earlier_calls.make(mesh.get_group(), step=lambda: model(torch.ones(4, 16)).sum().backward())
    for step in range(8):
        model(next_batch(rank, step)).sum().backward()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
