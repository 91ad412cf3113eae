"""Rank 2 has imported torch, and never gets to init_process_group.

No call comes before the fault: nobody has a process group yet.
"""

import os
import time

import torch
import torch.distributed as dist


def download_weights():
    time.sleep(600)  # PLANTED


def main():
    if os.environ["RANK"] == "2":
        download_weights()
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
