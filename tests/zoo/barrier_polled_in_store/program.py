"""The ranks meet at a counter of the store, which they poll. Rank 1 waits for a server that does not answer and never counts itself."""

import os
import socket
import time

import earlier_calls
import torch
import torch.distributed as dist


def meet(store, name, size):
    store.add(name, 1)
    while store.add(name, 0) < size:
        time.sleep(0.05)


def fetch_samples():
    server = socket.create_server(("127.0.0.1", 0))
    with socket.create_connection(server.getsockname()) as connection:
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        return connection.recv(64)  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    for step in range(10):
        dist.all_reduce(torch.ones(64))
        if rank == 1 and step == 5:
            fetch_samples()
        meet(store, f"step{step}", size)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
