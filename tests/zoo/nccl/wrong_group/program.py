"""Rank 1 hands the tensor for its pair to the whole world."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[rank // 2]
    earlier_calls.make(None, pair)
    activations, loss = torch.ones(32).to("cuda"), torch.ones(4).to("cuda")
    for step in range(10):
        group = pair
        if rank == 1 and step == 5:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            group = None
        dist.all_reduce(activations, group=group)  # PLANTED
        dist.all_reduce(loss)
        loss[0].item()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
