"""The network stalls, and nothing in the loop waits for the device: all hosts go on until their queue is full."""

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
    for step in range(5000):
        if step == 10:
            torch.cuda.synchronize()
            device_faults.stall_network()
            if rank == 0:
                open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        dist.all_reduce(loss)
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
