"""Ranks add up numbers over sockets of their own, without torch.distributed, and declare that; rank 1 goes off into code of its own."""

import os
import socket
import struct
import time
from contextlib import suppress

import earlier_calls
import torch

import hangwatch


def connect(rank, world_size):
    """Rank 0 to all others, by a socket whose name is that of the job's port; the others to rank 0."""
    name = "\0sum-" + os.environ["MASTER_PORT"]
    if rank == 0:
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(name)
        listening.listen(world_size)
        return [listening.accept()[0] for _ in range(world_size - 1)]
    link = socket.socket(socket.AF_UNIX)
    while True:
        with suppress(ConnectionRefusedError):  # it is not up yet
            link.connect(name)
            return [link]
        time.sleep(0.05)


def all_sum(value, links, rank):
    with hangwatch.collective("all_sum", "sockets"):
        if rank:
            links[0].sendall(struct.pack("d", value))
            return struct.unpack("d", links[0].recv(8))[0]
        value += sum(struct.unpack("d", link.recv(8))[0] for link in links)
        for link in links:
            link.sendall(struct.pack("d", value))
        return value


def upload_samples():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    time.sleep(600)  # PLANTED


def main():
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    links = connect(rank, world_size)
    for _ in range(earlier_calls.count()):
        all_sum(1.0, links, rank)
    for step in range(10):
        gradient = torch.full((4,), float(rank)).sum().item()
        if rank == 1 and step == 5:
            upload_samples()
        all_sum(gradient, links, rank)


if __name__ == "__main__":
    main()
