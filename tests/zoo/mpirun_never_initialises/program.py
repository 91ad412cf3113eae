"""mpirun numbers the processes, which take their ranks from that. Rank 2 never gets to init_process_group.

No call comes before the fault: nobody has a process group yet.
"""

import os
import time

import torch
import torch.distributed as dist


def download_weights():
    time.sleep(600)  # PLANTED


def main():
    rank, ranks = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    if rank == 2:
        download_weights()
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
