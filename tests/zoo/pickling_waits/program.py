"""Rank 2 gathers an object whose state is in another service, which does not answer."""

import os
import socket

import earlier_calls
import torch.distributed as dist


class RemoteTable:
    def __getstate__(self):
        service, own = socket.socketpair()
        self.service = service
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        return {"rows": own.recv(1)}  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(12):
        result = RemoteTable() if rank == 2 and step == 8 else step
        dist.all_gather_object([None] * 4, result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
