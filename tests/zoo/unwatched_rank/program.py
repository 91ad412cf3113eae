"""The launcher does not pass HANGWATCH_URL on to rank 2, which goes off into code of its own."""

import os
import socket
import subprocess
import sys
import time

import earlier_calls
import torch
import torch.distributed as dist

RANKS = 3


def start_ranks():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(RANKS)}
    ranks = []
    for rank in range(RANKS):
        environ = os.environ | shared | {"RANK": str(rank)}
        if rank == 2:
            del environ["HANGWATCH_URL"]
        ranks.append(subprocess.Popen([sys.executable, *sys.argv], env=environ))
    return max(rank.wait() for rank in ranks)


def main():
    if "RANK" not in os.environ:
        sys.exit(start_ranks())
    dist.init_process_group("gloo")
    earlier_calls.make()
    for step in range(20):
        if step == 10 and dist.get_rank() == 2:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            time.sleep(600)  # PLANTED
        dist.all_reduce(torch.ones(64))
        time.sleep(0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
