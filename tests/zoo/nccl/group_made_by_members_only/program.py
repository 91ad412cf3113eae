"""A new group must be made by all ranks. Here only its members make it, and rank 3 goes on to make the next one."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    earlier_calls.make()
    rank = dist.get_rank()
    encoder, decoder = [0, 1, 2], [1, 2, 3]
    loss = torch.ones(64).to("cuda")
    dist.all_reduce(loss)
    if rank in encoder:
        encoder_group = dist.new_group(encoder)
    else:
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    decoder_group = dist.new_group(decoder)
    for _ in range(10):
        if rank in encoder:
            dist.all_reduce(loss, group=encoder_group)
        if rank in decoder:
            dist.all_reduce(loss, group=decoder_group)
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
