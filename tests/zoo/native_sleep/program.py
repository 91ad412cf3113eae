"""Rank 1 calls a native library that sleeps and keeps the GIL. The sleep must last as long as it would without
hangwatch: a signal would end it."""

import ctypes
import os

import earlier_calls
import torch
import torch.distributed as dist

library = ctypes.PyDLL(None)


def wait_for_license():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    library.sleep(3600)  # PLANTED
    os._exit(77)  # the sleep has ended early


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    for _ in range(5):
        dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 1:
        wait_for_license()
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
