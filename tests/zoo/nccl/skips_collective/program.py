"""Rank 1 finds no labelled token in one batch, and leaves out the averaging of the loss."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    earlier_calls.make()
    rank = dist.get_rank()
    counts = torch.zeros(8).to("cuda")
    for step in range(20):
        loss = torch.full((64,), 1.0).to("cuda")
        has_labels = not (rank == 1 and step == 10)
        if has_labels:
            dist.all_reduce(loss)
        else:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        dist.broadcast(counts, src=0)  # PLANTED
        torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
