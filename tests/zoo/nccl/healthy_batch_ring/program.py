"""A ring of batches, whose operations each rank lists in another order; one rank computes before some of its batches."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.ones(200, 200) @ torch.ones(200, 200)


def main():
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl")
    earlier_calls.make()
    out, into = torch.ones(1 << 20, device="cuda"), torch.ones(1 << 20, device="cuda")
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
        torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
