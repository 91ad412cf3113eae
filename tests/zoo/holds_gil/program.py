"""Rank 1 is in a native extension that waits for a device and keeps the GIL."""

import ctypes
import os

import earlier_calls
import torch
import torch.distributed as dist

driver = ctypes.PyDLL(None)  # as an extension that never releases the GIL


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(10):
        if rank == 1 and step == 5:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            driver.sleep(600)  # PLANTED
        dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
