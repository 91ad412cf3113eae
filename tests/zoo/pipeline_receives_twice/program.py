"""One forward, one backward. Stage 2 has one warm-up batch more than stage 1 will send before it wants a gradient."""

import os

import earlier_calls
import torch
import torch.distributed as dist

pending = []


def forward(rank, last):
    x = torch.zeros(8, 32)
    if rank > 0:
        dist.recv(x, src=rank - 1)
    if rank < last:
        pending.append(dist.isend(x, dst=rank + 1))


def backward(rank, last):
    gradient = torch.zeros(8, 32)
    if rank < last:
        dist.recv(gradient, src=rank + 1)
    if rank > 0:
        pending.append(dist.isend(gradient, dst=rank - 1))


def main():
    dist.init_process_group("gloo")
    earlier_calls.make(None, (0, 1), (1, 2), (2, 3), (3, 2), (2, 1), (1, 0))
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    dist.barrier()
    warmup = [3, 2, 3, 1][rank]
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    for _ in range(warmup):
        forward(rank, last)
    for _ in range(4):
        backward(rank, last)
        forward(rank, last)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
