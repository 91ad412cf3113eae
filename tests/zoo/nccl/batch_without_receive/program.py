"""Ranks exchange with both neighbours in one batch. Rank 2 leaves out one receive, and then does not come back from its own code."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def exchange(rank, size, halo, is_complete):
    left, right = (rank - 1) % size, (rank + 1) % size
    operations = [
        dist.P2POp(dist.isend, halo[0], left),
        dist.P2POp(dist.isend, halo[1], right),
        dist.P2POp(dist.irecv, halo[2], right),
    ]
    if is_complete:
        operations.append(dist.P2POp(dist.irecv, halo[3], left))
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def write_halo():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    time.sleep(600)  # PLANTED


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    size = dist.get_world_size()
    halo = [torch.ones(64).to("cuda") for _ in range(4)]
    earlier_calls.make(step=lambda: exchange(rank, size, halo, is_complete=True))
    for step in range(10):
        exchange(rank, size, halo, is_complete=not (rank == 2 and step == 5))
        if rank == 2 and step == 5:
            write_halo()
        halo[3][0].item()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
