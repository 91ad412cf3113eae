"""The world's communicator is split in two (ncclCommSplit)."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def main():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    half = dist.split_group(split_ranks=[[0, 1], [2, 3]])
    earlier_calls.make(None, half)
    loss = torch.ones(64).to("cuda")
    for _ in range(40):
        dist.all_reduce(loss, group=half)
        dist.all_reduce(loss)
        loss[0].item()
        time.sleep(0.05 * (rank + 1) / 4)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
