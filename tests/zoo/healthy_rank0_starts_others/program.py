"""Rank 0 is started alone and starts the others, as Lightning's launcher does. Each has workers that load its data, and rank 0 starts a program."""

import os
import socket
import subprocess
import sys
import time

import earlier_calls
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

RANKS = 3


def start_others():
    """As Lightning's launcher does: rank 0 runs already when it starts the others."""
    if "LOCAL_RANK" in os.environ:
        return [], int(os.environ["LOCAL_RANK"])
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": "0", "WORLD_SIZE": str(RANKS)}
    others = []
    for local_rank in range(1, RANKS):
        others.append(subprocess.Popen([sys.executable, *sys.argv], env=os.environ | {"LOCAL_RANK": str(local_rank)}))
    os.environ["LOCAL_RANK"] = "0"
    return others, 0


def main():
    others, rank = start_others()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    earlier_calls.make()
    loader = DataLoader(list(range(40)), num_workers=1, multiprocessing_context="spawn")
    for _ in loader:
        dist.all_reduce(torch.ones(64))
        time.sleep(0.05)
    time.sleep(2.5 if rank == 1 else 0)
    dist.barrier()
    dist.destroy_process_group()
    for other in others:
        other.wait()


if __name__ == "__main__":
    main()
