"""Rank 1 reads a value that a kernel which never ends is to compute, before the reduction that the others wait in. Its host
uses 100 % of a core meanwhile, as a host does that waits for a GPU."""

import os

import device_faults
import earlier_calls
import torch
import torch.distributed as dist


def read_loss(loss):
    device_faults.spin_while_waiting()
    device_faults.launch_endless_kernel()
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    return loss[0].item()  # PLANTED


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    earlier_calls.make()
    rank = dist.get_rank()
    loss = torch.ones(64).to("cuda")
    for step in range(20):
        if rank == 1 and step == 10:
            read_loss(loss)
        dist.all_reduce(loss)
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
