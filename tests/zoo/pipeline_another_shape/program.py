"""Stage 1 sends a sequence longer than stage 2 has room for."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make(None, (0, 1), (1, 2))
    rank = dist.get_rank()
    for batch in range(6):
        length = 48 if batch == 4 and rank < 2 else 32
        x = torch.zeros(8, length)
        if rank == 0:
            dist.send(x, dst=1)
            continue
        if rank == 1:
            dist.recv(x, src=0)
        if batch == 4:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        dist.send(x, dst=2) if rank == 1 else dist.recv(x, src=1)  # PLANTED
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
