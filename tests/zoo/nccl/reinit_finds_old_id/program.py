"""The process group is initialised again over the same store, where the others find the unique id of the communicator before. All wait in the making of a communicator."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def train(steps):
    loss = torch.ones(64).to("cuda")
    for _ in range(steps):
        dist.all_reduce(loss)
        loss[0].item()


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    earlier_calls.make()
    train(30)
    dist.destroy_process_group()
    dist.init_process_group("nccl")
    if dist.get_rank() == 0:
        time.sleep(1)
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    train(30)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
