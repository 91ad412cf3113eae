"""Rank 1 evaluates for 12 seconds on its device, in kernels of 50 ms, and reads each result, while the others wait for it. Its
host uses 100 % of a core meanwhile, nearly always at one line."""

import os
import time

import device_faults
import earlier_calls
import torch
import torch.distributed as dist


def evaluate(loss):
    device_faults.spin_while_waiting()
    losses = []
    end = time.monotonic() + 12
    while time.monotonic() < end:
        device_faults.launch_sleep_kernel(0.05)
        output = loss * 2
        losses.append(output[0].item())
    return losses


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    earlier_calls.make()
    rank = dist.get_rank()
    loss = torch.ones(64).to("cuda")
    for step in range(20):
        if rank == 1 and step == 10:
            evaluate(loss)
        dist.all_reduce(loss)
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
