"""Started by mp.spawn, which catches the exception of rank 0, tells its parent and ends the others."""

import os
import socket

import earlier_calls
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def load_vocabulary():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    return open("vocabulary.txt")  # PLANTED


def train(rank, world_size, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    earlier_calls.make()
    for step in range(10):
        if rank == 0 and step == 5:
            load_vocabulary()
        dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    mp.spawn(train, args=(3, free), nprocs=3)
