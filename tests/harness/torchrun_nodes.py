"""torchrun with a node for each rank, all of them on this machine: ``torchrun_nodes.py RANKS PORT PROGRAM...``.

NCCL takes them for different machines, as each has its own NCCL_HOSTID; so it lets several ranks have the same GPU, which it
refuses within one machine, and connects them by sockets.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time


def main() -> int:
    """Ends all nodes once one has failed, as a scheduler does, and returns its status; or 0."""
    ranks, port, *program = sys.argv[1:]
    nodes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"),
                *(f"--nnodes={ranks}", f"--node-rank={node}"),
                *("--master-addr=127.0.0.1", f"--master-port={port}", *program),
            ],
            env={**os.environ, "NCCL_HOSTID": f"node{node}", "NCCL_SOCKET_IFNAME": "lo"},
        )
        for node in range(int(ranks))
    ]
    while True:
        statuses = [node.poll() for node in nodes]
        if failed := next((status for status in statuses if status), None):
            for node in nodes:
                node.terminate()
            return failed
        if None not in statuses:
            return 0
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
