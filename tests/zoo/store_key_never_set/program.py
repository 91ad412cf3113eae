"""Rank 1 waits in the job's store for a key that nobody sets; the others went on."""

import datetime
import os

import earlier_calls
import torch
import torch.distributed as dist


def wait_for_dataset(store):
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    store.wait(["dataset/ready"], datetime.timedelta(minutes=30))  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    for step in range(10):
        if rank == 1 and step == 5:
            wait_for_dataset(store)
        dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
