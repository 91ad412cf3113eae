"""Lazy communicators: the first collective makes them, which blocks the hosts. Rank 3 compiles its kernels meanwhile.

No call comes before the fault, which is in the first one.
"""

import os
import time

import torch
import torch.distributed as dist


def compile_kernels():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    time.sleep(600)  # PLANTED


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    if rank == 3:
        compile_kernels()
    dist.all_reduce(torch.ones(64).to("cuda"))
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
