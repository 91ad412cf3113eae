"""Object collectives between steps."""

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
    loss = torch.ones(64).to("cuda")
    for step in range(20):
        dist.all_reduce(loss)
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, {"rank": rank, "step": step})
        assert [entry["rank"] for entry in gathered] == list(range(dist.get_world_size()))
        time.sleep(0.05)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
