"""As endless_kernel_untimed, with the plugin for calls alone: torch's groups are shown once, and nothing distinguishes the ranks."""

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
        loss[0].item()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
