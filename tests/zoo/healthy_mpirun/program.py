"""mpirun numbers the processes, which take their ranks from that. Rank 1 starts late, and all train."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def main():
    rank, ranks = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    if rank == 1:
        time.sleep(8)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    earlier_calls.make()
    for _ in range(50):
        dist.all_reduce(torch.ones(64))
        time.sleep(0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
