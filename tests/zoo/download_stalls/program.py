"""Rank 0 downloads, and after a while nothing comes any more, though the connection stays; its peers wait at the barrier."""

import os
import socket
import threading
import time

import earlier_calls
import torch.distributed as dist


def serve(listener, seconds):
    connection, _ = listener.accept()
    for _ in range(10 * seconds):
        connection.sendall(bytes(100_000))
        time.sleep(0.1)
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    threading.Event().wait()


def download(address):
    size = 0
    with socket.create_connection(address) as connection:
        while data := connection.recv(1 << 20):  # PLANTED
            size += len(data)
    return size


def share_address(listener):
    """Rank 1's address, on all ranks."""
    addresses = [listener and listener.getsockname()]
    dist.broadcast_object_list(addresses, 1)
    return tuple(addresses[0])


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    listener = socket.create_server(("127.0.0.1", 0)) if rank == 1 else None
    if listener is not None:
        threading.Thread(target=serve, args=(listener, 1), daemon=True).start()
    address = share_address(listener)
    if rank == 0:
        download(address)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
