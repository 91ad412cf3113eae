"""Rank 2's stream waits for an event that nobody records."""

import os

import device_faults
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
        if rank == 2 and step == 10:
            device_faults.wait_forever()
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        dist.all_reduce(loss)
        torch.cuda.synchronize()  # PLANTED
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
