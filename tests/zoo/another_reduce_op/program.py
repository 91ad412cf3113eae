"""Rank 3 takes the maximum where its peers sum. Nothing hangs: the numbers are wrong, and the job ends well."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(40):
        loss = torch.tensor([float(rank)])
        how = dist.ReduceOp.SUM
        if rank == 3 and step == 20:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            how = dist.ReduceOp.MAX
        dist.all_reduce(loss, op=how)  # PLANTED
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
