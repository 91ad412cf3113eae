"""Ranks 0 and 2 wait in the store for the key that rank 3 sets. Rank 3 waits for a server that does not answer; rank 1 is at the barrier."""

import datetime
import os
import socket

import earlier_calls
import torch
import torch.distributed as dist


def fetch_settings():
    server = socket.create_server(("127.0.0.1", 0))
    with socket.create_connection(server.getsockname()) as connection:
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        return connection.recv(64)  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    for _ in range(10):
        dist.all_reduce(torch.ones(8))
    if rank == 3:
        fetch_settings()
        store.set("settings", "1")
    elif rank != 1:
        store.wait(["settings"], datetime.timedelta(minutes=30))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
