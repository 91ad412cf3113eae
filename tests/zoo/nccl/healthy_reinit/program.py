"""The process group is destroyed and initialised again."""

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
        time.sleep(0.05)


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    for phase in range(2):
        # Under one prefix, ranks would find the unique id of the phase before.
        dist.init_process_group("nccl", store=dist.PrefixStore(f"phase{phase}", store), rank=rank, world_size=world_size)
        earlier_calls.make(share=1 / 2)
        train(30)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
