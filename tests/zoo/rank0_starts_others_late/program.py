"""Rank 0 is started alone and starts the others, as Lightning's launcher does. Rank 1 waits for its data before it joins them.

No call comes before the fault: nobody has a process group yet.
"""

import os
import socket
import subprocess
import sys
import time

import torch
import torch.distributed as dist

RANKS = 3


def prepare_data():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    while not os.path.exists("data.ready"):
        time.sleep(0.2)  # PLANTED


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
    if rank == 1:
        prepare_data()
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()
    for other in others:
        other.wait()


if __name__ == "__main__":
    main()
