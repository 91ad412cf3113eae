"""The first stage of a pipeline ends one micro-batch too soon; the second waits for it, and the third for the second."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make((0, 1), (1, 2))
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    for _ in range(11 if rank == 0 else 12):
        x = torch.zeros(8, 32)
        if rank > 0:
            dist.recv(x, src=rank - 1)
        if rank < last:
            dist.send(x, dst=rank + 1)
    if rank == 0:
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()


if __name__ == "__main__":
    main()
