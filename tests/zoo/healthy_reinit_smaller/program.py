"""All train; then ranks 0 and 1 evaluate in a world of their own, with groups of the same names, and all meet again, rank 2 late."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def world(store, name, rank, size, seconds):
    dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=size)
    pairs = [dist.new_group(sorted({first, (first + 1) % size})) for first in range(size)]
    earlier_calls.make(None, *pairs, share=1 / 4)
    for _ in range(10):
        dist.all_reduce(torch.ones(4))
        for first, pair in enumerate(pairs):
            if rank in (first, (first + 1) % size):
                dist.broadcast(torch.ones(4), src=first, group=pair)
        time.sleep(seconds / 10)
    dist.destroy_process_group()


def main():
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    rank = int(os.environ["RANK"])
    world(store, "train", rank, 3, 1.0)
    if rank < 2:
        world(store, "evaluate", rank, 2, 6.0)  # rank 2 waits for these
    world(store, "train on", rank, 3, 1.0)
    if rank == 2:
        time.sleep(2.5)  # the others wait for it
    world(store, "train further", rank, 3, 1.0)


if __name__ == "__main__":
    main()
