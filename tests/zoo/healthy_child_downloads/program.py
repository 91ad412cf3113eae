"""Rank 1 waits for a program that downloads 1 MB a second; its peers wait at the barrier."""

import socket
import subprocess
import sys
import threading
import time

import earlier_calls
import torch.distributed as dist

CLIENT = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
    while connection.recv(1 << 20):
        pass
"""


def serve(listener, seconds):
    connection, _ = listener.accept()
    with connection:
        for _ in range(10 * seconds):
            connection.sendall(bytes(100_000))
            time.sleep(0.1)


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    if rank == 0:
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=serve, args=(listener, 15), daemon=True).start()
    ports = [listener.getsockname()[1] if rank == 0 else None]
    dist.broadcast_object_list(ports, 0)
    if rank == 1:
        subprocess.run([sys.executable, "-c", CLIENT, str(ports[0])], check=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
