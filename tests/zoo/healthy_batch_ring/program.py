"""A ring of batches, whose operations each rank lists in another order; one rank computes before some of its batches."""

import time

import earlier_calls
import torch
import torch.distributed as dist


def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.ones(200, 200) @ torch.ones(200, 200)


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank, size = dist.get_rank(), dist.get_world_size()
    out, into = torch.ones(1 << 20), torch.ones(1 << 20)
    for step in range(20):
        if step in (8, 16) and rank == step // 8:
            compute(7)
        operations = [
            dist.P2POp(dist.isend, out, (rank + 1) % size),
            dist.P2POp(dist.irecv, into, (rank - 1) % size),
        ]
        if rank % 2:
            operations.reverse()
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
