"""Ranks 2 and 3 leave out a collective that looks like the following ones: a flag that guards it differs. They are
in a broadcast where the others still reduce, long after that."""
import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for _ in range(60):
        dist.all_reduce(torch.ones(1))
        time.sleep(0.02)
    if rank < 2:
        dist.all_reduce(torch.ones(1))
    for _ in range(20):
        dist.all_reduce(torch.ones(1))
        time.sleep(0.02)
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    dist.broadcast(torch.ones(5), 0)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
