"""Forked from a notebook's process, as Accelerate's notebook launcher does. Rank 1 waits for input."""

import os
import socket
import time

import earlier_calls
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def wait_for_input(path):
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    while not os.path.exists(path):
        time.sleep(0.5)  # PLANTED


def train(rank, world_size, port):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    dist.init_process_group("gloo")
    earlier_calls.make()
    for step in range(10):
        if rank == 1 and step == 5:
            wait_for_input("never-written.txt")
        dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = str(probe.getsockname()[1])
    mp.start_processes(train, args=(3, free), nprocs=3, start_method="fork")
