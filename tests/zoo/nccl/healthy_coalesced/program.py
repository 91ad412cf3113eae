"""Gradients are reduced in one coalesced call."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    earlier_calls.make()
    gradients = [torch.ones(size).to("cuda") for size in (64, 32, 16)]
    for _ in range(50):
        with _coalescing_manager(device=torch.device("cuda", torch.cuda.current_device())):
            for gradient in gradients:
                dist.all_reduce(gradient)
        dist.all_reduce(gradients[0])
        time.sleep(0.05)
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
