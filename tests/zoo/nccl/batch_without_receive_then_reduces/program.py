"""Rank 2 leaves one receive out of its batch: rank 1's device waits for it, and the others for the reduction that comes next."""

import os

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


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    size = dist.get_world_size()
    # More than fits into a connection's buffers: a send of less would end without its receive.
    halo = [torch.ones(1 << 24).to("cuda") for _ in range(4)]
    small = [torch.ones(64).to("cuda") for _ in range(4)]
    earlier_calls.make(step=lambda: exchange(rank, size, small, is_complete=True))
    residual = torch.ones(1).to("cuda")
    for step in range(10):
        is_complete = not (rank == 2 and step == 9)
        if not is_complete:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        exchange(rank, size, halo, is_complete)
        dist.all_reduce(residual)
        residual.item()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
