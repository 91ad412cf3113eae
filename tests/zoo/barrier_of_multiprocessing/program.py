"""Ranks 0 to 2 meet at a barrier of multiprocessing. Rank 2 waits for a worker's answer that never comes; rank 3 is in an all-reduce."""

import multiprocessing
import os
import socket

import earlier_calls
import torch
import torch.distributed as dist


def take_answer():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    return multiprocessing.get_context("fork").Queue().get()  # PLANTED


def train(rank, size, meeting):
    dist.init_process_group("gloo", rank=rank, world_size=size)
    earlier_calls.make()
    for step in range(10):
        if rank == 2 and step == 5:
            take_answer()
        if rank < 3:
            meeting.wait()
        dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


def main():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    meeting = multiprocessing.get_context("spawn").Barrier(3)
    torch.multiprocessing.spawn(train, args=(4, meeting), nprocs=4)


if __name__ == "__main__":
    main()
