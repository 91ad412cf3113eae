"""Rank 2 does not split the world's communicator as the others do, and goes on to make the next group."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    earlier_calls.make()
    rank = dist.get_rank()
    loss = torch.ones(64).to("cuda")
    dist.all_reduce(loss)
    loss[0].item()
    if rank == 2:
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    else:
        half = dist.split_group(split_ranks=[[0, 1], [2, 3]])
        dist.all_reduce(loss, group=half)
    pair = dist.new_group([0, 2])
    if rank in (0, 2):
        dist.all_reduce(loss, group=pair)
        loss[0].item()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
