"""The devices are busy for 6 seconds, while the hosts issue thousands of calls."""

import os

import device_faults
import earlier_calls
import torch
import torch.distributed as dist


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    earlier_calls.make()
    loss = torch.ones(64).to("cuda")
    dist.all_reduce(loss)
    loss[0].item()
    device_faults.launch_sleep_kernel(6)
    for _ in range(3000):
        dist.all_reduce(loss)
    loss[0].item()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
