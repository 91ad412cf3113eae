"""Started by mp.spawn. Rank 1 waits for its data before init_process_group, and only its absence shows that.

No call comes before the fault: nobody has a process group yet.
"""

import os
import socket
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def train(rank, world_size, port):
    if rank == 1:
        time.sleep(600)
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    mp.spawn(train, args=(3, free), nprocs=3)
