"""Eager communicators: all ranks but rank 3 wait in init_process_group(device_id=...).

No call comes before the fault: nobody has a process group yet.
"""

import os
import time

import torch
import torch.distributed as dist


def download_weights():
    time.sleep(600)  # PLANTED


def main():
    if os.environ["RANK"] == "3":
        download_weights()
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    dist.all_reduce(torch.ones(64).to("cuda"))
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
