"""Rank 2 decides by its own loss that training is complete, and is at the barrier while the others train."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    earlier_calls.make()
    rank = dist.get_rank()
    gradients = torch.ones(64).to("cuda")
    for step in range(40):
        if rank == 2 and step == 20:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            break
        dist.all_reduce(gradients)
        gradients[0].item()
    dist.barrier()  # PLANTED
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
