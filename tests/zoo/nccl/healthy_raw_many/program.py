"""A library makes and destroys 300 communicators, of which two exist at a time."""

import os

import earlier_calls
import raw_nccl
import torch
import torch.distributed as dist


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    earlier_calls.make()
    hidden = torch.ones(64, device="cuda")
    previous = None
    for number in range(300):
        communicator = raw_nccl.Communicator(f"communicator {number}")
        communicator.all_reduce(hidden)
        torch.cuda.synchronize()
        if previous is not None:
            previous.destroy()
        previous = communicator
    previous.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
