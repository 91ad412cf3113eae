"""Rank 0 uploads to a server that takes 1 MB a second; its peers wait at the barrier."""

import socket
import threading
import time

import earlier_calls
import torch.distributed as dist


def serve(listener):
    connection, _ = listener.accept()
    with connection:
        while connection.recv(100_000):
            time.sleep(0.1)


def upload(address, size):
    with socket.create_connection(address) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        connection.sendall(bytes(size))


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
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
    address = share_address(listener)
    if rank == 0:
        upload(address, 12_000_000)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
