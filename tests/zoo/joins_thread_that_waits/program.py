"""Rank 1 joins a thread of its own, which waits in the store for the key of rank 2. Rank 2 waits on an event that nobody sets."""

import datetime
import os
import threading

import earlier_calls
import torch
import torch.distributed as dist


def receive_plan(store):
    store.wait(["plan"], datetime.timedelta(minutes=30))


def make_plan():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    threading.Event().wait()  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    dist.all_reduce(torch.ones(8))
    if rank == 1:
        thread = threading.Thread(target=receive_plan, args=(store,))
        thread.start()
        thread.join()
    if rank == 2:
        make_plan()
        store.set("plan", "1")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
