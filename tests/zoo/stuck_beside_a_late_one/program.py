"""Rank 1 waits for an answer that never comes. Rank 2, for which it might be waiting, works for a while and comes."""

import os
import socket
import time

import earlier_calls
import torch
import torch.distributed as dist


def ask():
    here, there = socket.socketpair()
    here.sendall(b"?")
    return here.recv(1), there  # PLANTED


def work(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(i * i for i in range(2000))


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(10):
        if rank == 1 and step == 5:
            ask()
        if rank == 2 and step == 5:
            work(6)
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
