"""Started by mp.spawn. Rank 2 goes off into code of its own."""

import os
import socket
import time

import earlier_calls
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def render_samples():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    time.sleep(600)  # PLANTED


def train(rank, world_size, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    earlier_calls.make()
    for step in range(10):
        if rank == 2 and step == 5:
            render_samples()
        dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    mp.spawn(train, args=(3, free), nprocs=3)
