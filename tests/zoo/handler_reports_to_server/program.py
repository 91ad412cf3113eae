"""Rank 2 catches an error and reports it to a server that accepts and never answers. The others go on to the next step."""

import os
import socket

import earlier_calls
import torch
import torch.distributed as dist


def report(error, server):
    with socket.create_connection(server.getsockname()) as connection:
        connection.sendall(str(error).encode())
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        connection.recv(64)  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    server = socket.create_server(("127.0.0.1", 0))
    for step in range(10):
        try:
            if rank == 2 and step == 6:
                raise ValueError("the loss is not finite")
        except ValueError as error:
            report(error, server)
        dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
