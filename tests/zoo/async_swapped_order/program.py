"""Rank 1 starts two asynchronous collectives in the other order."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    gradients, norm, norms = torch.ones(64), torch.ones(1), torch.empty(world_size)
    for step in range(8):
        if rank == 1 and step == 4:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            gather = dist.all_gather_into_tensor(norms, norm, async_op=True)  # PLANTED
            reduce = dist.all_reduce(gradients, async_op=True)
        else:
            reduce = dist.all_reduce(gradients, async_op=True)
            gather = dist.all_gather_into_tensor(norms, norm, async_op=True)
        reduce.wait()
        gather.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
