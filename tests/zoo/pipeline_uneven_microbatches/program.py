"""Stage 0 splits the last, smaller batch into 3 micro-batches and goes on to the all-reduce; stage 1 expects a fourth."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make(None, (0, 1))
    rank = dist.get_rank()
    gradients = torch.ones(64)
    for step in range(4):
        microbatches = 3 if rank == 0 and step == 3 else 4
        x = torch.ones(8, 16)
        for _ in range(microbatches):
            if rank == 0:
                dist.send(x, dst=1)
            else:
                dist.recv(x, src=0)
        if microbatches == 3:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        dist.all_reduce(gradients)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
