"""Neighbours in a ring exchange halos in one batch."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    earlier_calls.make()
    rank = dist.get_rank()
    size = dist.get_world_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    halo = [torch.ones(64).to("cuda") for _ in range(4)]
    for _ in range(50):
        operations = [
            dist.P2POp(dist.isend, halo[0], left),
            dist.P2POp(dist.isend, halo[1], right),
            dist.P2POp(dist.irecv, halo[2], right),
            dist.P2POp(dist.irecv, halo[3], left),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        time.sleep(0.05)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
