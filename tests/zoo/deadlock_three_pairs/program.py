"""Three ranks share a group with each neighbour, and each turns to the one on its right first."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pairs = [dist.new_group([i, (i + 1) % 3]) for i in range(3)]
    earlier_calls.make(None, *pairs)
    dist.barrier()
    border = torch.ones(16)
    if rank < 3:
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        for pair in (pairs[rank], pairs[(rank - 1) % 3]):
            dist.all_reduce(border, group=pair)  # PLANTED
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
