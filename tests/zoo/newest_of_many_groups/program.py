"""600 process groups that nobody destroys. Rank 1 goes off into code of its own before the call in the newest one."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist

GROUPS = 600


def upload_samples():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    time.sleep(600)  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    groups = []
    for number in range(GROUPS):
        groups.append(dist.new_group())
        if number == GROUPS - 1 and dist.get_rank() == 1:
            upload_samples()
        dist.all_reduce(torch.ones(8), group=groups[-1])


if __name__ == "__main__":
    main()
