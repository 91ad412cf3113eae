"""Reductions are started early, and awaited seconds later in another order."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    earlier_calls.make()
    rank = dist.get_rank()
    gradients = [torch.ones(size).to("cuda") for size in (64, 32, 16)]
    for _ in range(3):
        works = [dist.all_reduce(gradient, async_op=True) for gradient in gradients]
        time.sleep(1.5 + rank / 4)
        for work in reversed(works):
            work.wait()
        gradients[0][0].item()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
