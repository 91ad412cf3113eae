"""The process group is destroyed and initialised again."""

import os
import time

import torch
import torch.distributed as dist


def train(steps):
    loss = torch.ones(64).to("cuda")
    for _ in range(steps):
        dist.all_reduce(loss)
        loss[0].item()
        time.sleep(0.05)


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    for _ in range(2):
        dist.init_process_group("nccl")
        train(30)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
