"""Rank 0 receives from any source and then, by name, from the other of two senders. Rank 2 stalls before it sends."""

import os
import threading

import earlier_calls
import torch
import torch.distributed as dist


def read_shard():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    threading.Event().wait()  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make(None, (1, 0), (2, 0))
    rank = dist.get_rank()
    for step in range(6):
        if rank == 0:
            first = dist.recv(torch.ones(4))
            dist.recv(torch.ones(4), src=3 - first)
        elif rank < 3:
            if rank == 2 and step == 4:
                read_shard()
            dist.send(torch.ones(4), dst=0)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
