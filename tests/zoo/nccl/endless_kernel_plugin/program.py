"""As endless_kernel_untimed, but NCCL's plugin reports when a device begins a call: rank 1's does not."""

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
        if rank == 1 and step == 10:
            device_faults.launch_endless_kernel()
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        dist.all_reduce(loss)
        loss[0].item()  # PLANTED
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
