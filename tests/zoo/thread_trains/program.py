"""The training runs in a thread, and the main thread waits for its end. On rank 2 the thread asks a service for its next shard, which never answers."""

import os
import socket
import threading

import earlier_calls
import torch
import torch.distributed as dist


def fetch_shard(service):
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    return service.recv(1024)  # PLANTED


def train(rank, service):
    earlier_calls.make()
    for step in range(10):
        if rank == 2 and step == 5:
            fetch_shard(service)
        dist.all_reduce(torch.ones(64))


def main():
    dist.init_process_group("gloo")
    service, _peer = socket.socketpair()
    thread = threading.Thread(target=train, args=(dist.get_rank(), service))
    thread.start()
    thread.join()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
