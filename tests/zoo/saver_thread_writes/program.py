"""A thread saves checkpoints and meets its peers on a group of its own, while the main threads train. The write of rank 1 never ends; the next checkpoint waits for this one."""

import os
import threading

import earlier_calls
import torch
import torch.distributed as dist


def write_shard(path):
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    with open(path, "wb") as file:  # PLANTED
        torch.save(torch.ones(4), file)


def save(group, rank, path):
    earlier_calls.make(group, share=1 / 3)
    if rank == 1:
        write_shard(path)
    dist.barrier(group=group)


def main():
    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), dist.new_group()
    earlier_calls.make(share=2 / 3)
    path = f"shard{rank}.pt"
    if rank == 1:
        os.mkfifo(path)  # opening it blocks until somebody reads
    saver = threading.Thread(target=save, args=(group, rank, path))
    for step in range(10):
        if step == 4:
            saver.start()
        dist.all_reduce(torch.ones(64))
    saver.join()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
