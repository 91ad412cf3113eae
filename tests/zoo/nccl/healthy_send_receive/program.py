"""A chain of sends and receives, each pair with a communicator of its own."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    earlier_calls.make(None, (0, 1), (1, 2), (2, 3))
    rank = dist.get_rank()
    last = dist.get_world_size() - 1
    hidden = torch.ones(64).to("cuda")
    for _ in range(40):
        if rank > 0:
            dist.recv(hidden, src=rank - 1)
        time.sleep(0.02)
        if rank < last:
            dist.send(hidden, dst=rank + 1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
