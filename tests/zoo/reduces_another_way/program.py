"""Rank 0 reduces its shards with the maximum where its peers sum. Nothing hangs, and the gradients are wrong."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(30):
        shard, gradients = torch.empty(8), torch.ones(8 * world_size)
        how = dist.ReduceOp.SUM
        if rank == 0 and step == 15:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            how = dist.ReduceOp.MAX
        dist.reduce_scatter_tensor(shard, gradients, op=how)  # PLANTED
        time.sleep(0.02)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
