"""A thread saves checkpoints and meets its peers on a group of its own; the storage of one rank is slow each time. The main threads train meanwhile, and one of them is late, too."""

import threading
import time

import earlier_calls
import torch
import torch.distributed as dist


def save(group, rank, number):
    earlier_calls.make(group, share=1 / 6)
    if rank == number % 3:
        time.sleep(3)
    torch.save(torch.ones(4), f"shard{rank}.pt")
    dist.barrier(group=group)


def main():
    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), dist.new_group()
    earlier_calls.make(share=1 / 2)
    saver = None
    for step in range(60):
        if step % 20 == 4:
            if saver is not None:
                saver.join()
            saver = threading.Thread(target=save, args=(group, rank, step // 20))
            saver.start()
        if rank == 2 and step % 20 == 10:
            time.sleep(2)
        dist.all_reduce(torch.ones(64))
        time.sleep(0.05)
    saver.join()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
