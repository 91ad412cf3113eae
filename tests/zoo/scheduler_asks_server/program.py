"""Rank 1's learning-rate schedule asks a tuning server, which takes the connection and never answers."""

import os
import socket

import earlier_calls
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

server = socket.create_server(("127.0.0.1", 0))


def tuned(epoch):
    if dist.get_rank() == 1 and epoch == 3:
        with socket.create_connection(server.getsockname()) as connection:
            connection.sendall(b"GET /lr\n")
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            return float(connection.recv(64))  # PLANTED
    return 0.9**epoch


def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(16, 4))
    earlier_calls.make(step=lambda: model(torch.randn(8, 16)).sum().backward())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, tuned)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
