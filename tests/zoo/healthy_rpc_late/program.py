"""Rank 1 computes before init_rpc, and before it answers; its peers wait for it.

No call comes before the fault: nobody has a process group yet.
"""

import os
import time

import torch
import torch.distributed.rpc as rpc


def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.ones(200, 200) @ torch.ones(200, 200)


def answer(seconds):
    compute(seconds)
    return seconds


def main():
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 1:
        compute(8)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    if rank == 0:
        for seconds in (0, 8):
            rpc.rpc_sync("worker1", answer, args=(seconds,))
    rpc.shutdown()


if __name__ == "__main__":
    main()
