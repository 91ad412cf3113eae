"""A mixture of experts: each rank sends another number of tokens to each other."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    earlier_calls.make()
    rank = dist.get_rank()
    size = dist.get_world_size()
    for step in range(40):
        sent = [1 + (rank + expert + step) % 3 for expert in range(size)]
        received = [1 + (expert + rank + step) % 3 for expert in range(size)]
        tokens = torch.ones(sum(sent), 8).to("cuda")
        mine = torch.ones(sum(received), 8).to("cuda")
        dist.all_to_all_single(mine, tokens, received, sent)
        time.sleep(0.05)
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
