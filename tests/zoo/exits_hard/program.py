"""A library of rank 3 ends the process without a word and without an exit handler."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(30):
        if rank == 3 and step == 20:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            os._exit(1)
        time.sleep(0.05)
        dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
