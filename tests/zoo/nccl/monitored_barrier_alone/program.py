"""The job has a gloo group beside NCCL for its monitored barrier, which rank 1 does not reach."""

import os
import time
from datetime import timedelta

import earlier_calls
import torch
import torch.distributed as dist


def prepare_epoch():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    time.sleep(600)  # PLANTED


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    control = dist.new_group(backend="gloo")
    earlier_calls.make(None, control)
    loss = torch.ones(64).to("cuda")
    for epoch in range(3):
        for _ in range(5):
            dist.all_reduce(loss)
        if rank == 1 and epoch == 1:
            prepare_epoch()
        dist.monitored_barrier(control, timeout=timedelta(seconds=60))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
