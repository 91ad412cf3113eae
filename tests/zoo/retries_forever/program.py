"""Rank 0 cannot reach the server for its samples, and tries again and again in its exception handler."""

import os
import socket
import time

import earlier_calls
import torch
import torch.distributed as dist


def fetch():
    while True:
        try:
            return socket.create_connection(("127.0.0.1", 9), timeout=1).recv(4096)
        except OSError:
            time.sleep(5)  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(10):
        if rank == 0 and step == 5:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            fetch()
        dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
