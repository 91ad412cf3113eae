"""Rank 1 looks for the job's store at another port than its peers, where something listens that is no store.

No call comes before the fault: nobody has a process group yet.
"""

import os
import socket

import torch
import torch.distributed as dist


def main():
    if os.environ["RANK"] == "1":
        other = socket.create_server(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(other.getsockname()[1])
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    dist.init_process_group("gloo")  # PLANTED
    dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
