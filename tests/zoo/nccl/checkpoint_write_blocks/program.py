"""Rank 0 writes a checkpoint into a pipe that nobody reads; the others are at the barrier."""

import os
import tempfile

import earlier_calls
import torch
import torch.distributed as dist


def save_checkpoint(weights):
    path = os.path.join(tempfile.mkdtemp(), "checkpoint")
    os.mkfifo(path)
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    with open(path, "wb") as file:  # PLANTED
        torch.save(weights, file)


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    earlier_calls.make()
    rank = dist.get_rank()
    weights = torch.ones(64).to("cuda")
    for step in range(10):
        dist.all_reduce(weights)
        if step == 5:
            if rank == 0:
                save_checkpoint(weights.cpu())
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
