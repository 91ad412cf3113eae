"""A thread gathers metrics on a group of its own. It is ahead on rank 1, and late on rank 0, while the main threads are the other way."""

import threading
import time

import earlier_calls
import torch
import torch.distributed as dist


def gather(group, rank):
    earlier_calls.make(group, share=1 / 2)
    for _ in range(3):
        if rank == 0:
            time.sleep(2.8)
        dist.all_reduce(torch.ones(4), group=group)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    thread = threading.Thread(target=gather, args=(dist.new_group(), rank))
    thread.start()
    earlier_calls.make(share=1 / 2)
    for _ in range(3):
        if rank == 1:
            time.sleep(2.8)
        dist.all_reduce(torch.ones(8))
    thread.join()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
