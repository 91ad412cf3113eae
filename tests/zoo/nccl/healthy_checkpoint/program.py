"""Rank 0 writes a checkpoint for 8 seconds and has declared it; the others are at the barrier."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist

import hangwatch


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    earlier_calls.make()
    rank = dist.get_rank()
    weights = torch.ones(64).to("cuda")
    for step in range(20):
        dist.all_reduce(weights)
        if step == 10:
            if rank == 0:
                with hangwatch.phase("checkpoint", limit=60):
                    time.sleep(8)
            dist.barrier()
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
