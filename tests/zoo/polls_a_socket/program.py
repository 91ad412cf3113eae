"""Rank 1 polls a socket to which nobody sends anything: it alternates between a wait in a function of Python and a sleep."""

import os
import selectors
import socket
import time

import earlier_calls
import torch
import torch.distributed as dist


def wait_for_samples(connection):
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        while not (selector.select(timeout=0.3) or time.sleep(0.3)):  # PLANTED
            pass
    return connection.recv(64)


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    ours, _theirs = socket.socketpair()
    for step in range(10):
        if rank == 1 and step == 5:
            wait_for_samples(ours)
        dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
