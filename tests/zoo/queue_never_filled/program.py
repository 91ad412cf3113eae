"""Rank 2's prefetching thread has died of a bad sample, and the training waits for its queue."""

import os
import queue
import threading

import earlier_calls
import torch
import torch.distributed as dist


def prefetch(batches, rank):
    for n in range(20):
        if rank == 2 and n == 8:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            raise ValueError(f"sample {n} is corrupt")
        batches.put(torch.full((16,), float(n)))


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    batches = queue.Queue(maxsize=2)
    threading.Thread(target=prefetch, args=(batches, rank), daemon=True).start()
    for _ in range(20):
        batch = batches.get()  # PLANTED
        dist.all_reduce(batch.mean())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
