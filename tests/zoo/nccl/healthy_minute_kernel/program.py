"""Every rank runs a kernel of 60 seconds, as long as the server's default limit, and the hosts wait for the next reduction."""

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
    for step in range(20):
        if step == 10:
            device_faults.launch_sleep_kernel(60)
        dist.all_reduce(loss)
        loss[0].item()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
