"""A pipeline of four stages. Stage 2 is in its own code; the stages after it wait for activations, those before for gradients."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def write_trace():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    time.sleep(600)  # PLANTED


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    earlier_calls.make((0, 1), (1, 2), (2, 3), (3, 2), (2, 1), (1, 0))
    rank = dist.get_rank()
    last = dist.get_world_size() - 1
    hidden, gradient = torch.ones(64).to("cuda"), torch.ones(64).to("cuda")
    for step in range(10):
        if rank == 2 and step == 5:
            write_trace()
        if rank > 0:
            dist.recv(hidden, src=rank - 1)
        if rank < last:
            dist.send(hidden, dst=rank + 1)
            dist.recv(gradient, src=rank + 1)
        if rank > 0:
            dist.send(gradient, dst=rank - 1)
        torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
