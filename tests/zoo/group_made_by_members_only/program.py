"""A new group must be made by all ranks. Here only its members make it, and rank 3 goes on to make the next one."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    encoder = [0, 1, 2]
    if rank in encoder:
        encoder_group = dist.new_group(encoder)
    else:
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    decoder_group = dist.new_group([1, 2, 3])
    for _ in range(10):
        if rank in encoder:
            dist.all_reduce(torch.ones(64), group=encoder_group)
        if rank != 0:
            dist.all_reduce(torch.ones(64), group=decoder_group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
