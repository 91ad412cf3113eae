"""Each step makes a process group and destroys it. In the last one, rank 1 goes off into code of its own."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist

STEPS = 700


def upload_samples():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    time.sleep(600)  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    for step in range(STEPS):
        group = dist.new_group()
        dist.all_reduce(torch.ones(8), group=group)
        if step == STEPS - 1 and dist.get_rank() == 1:
            upload_samples()
        dist.all_reduce(torch.ones(8), group=group)
        dist.destroy_process_group(group)


if __name__ == "__main__":
    main()
