"""torchrun with a node for each rank, all of them on this machine: ``torchrun_nodes.py RANKS PORT PROGRAM...``.

NCCL takes them for different machines, as each has its own NCCL_HOSTID; so it lets several ranks have the same GPU, which it
refuses within one machine, and connects them by sockets.
"""

from __future__ import annotations

import os
import subprocess
import sys


def main() -> int:
    """Returns the status of the first node that failed, or 0."""
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
    statuses = [process.wait() for process in nodes]
    return next((status for status in statuses if status), 0)


if __name__ == "__main__":
    sys.exit(main())
