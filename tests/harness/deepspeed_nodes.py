"""DeepSpeed's launcher on two nodes, which are this machine: ``deepspeed_nodes.py RANKS PORT PROGRAM...``.

pdsh is replaced by a script that runs each node's command here, with no more of this environment
than ssh would pass on. DeepSpeed exports what its file of variables has, so hangwatch's are there.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

NODES = 2
# -w has the nodes; the remaining arguments are the command, in which %n is the node's number.
_PDSH = """#!/bin/sh
while [ $# -gt 0 ]; do
    case "$1" in
    -S) shift ;;
    -f) shift 2 ;;
    -w) nodes=$2; shift 2 ;;
    *) break ;;
    esac
done
number=0; pids=""
for node in $(echo "$nodes" | tr , " "); do
    command=$(echo "$*" | sed "s/%n/$number/g")
    env -i PATH="$PATH" HOME="$HOME" sh -c "$command" & pids="$pids $!"
    number=$((number + 1))
done
status=0; for pid in $pids; do wait $pid || status=1; done; exit $status
"""
_EXPORTED = ("HANGWATCH_", "DS_", "OMP_", "PLANTED_AT", "PYTHON")


def main() -> int:
    ranks, port, *program = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="deepspeed-nodes-") as name:
        folder = Path(name)
        (folder / "pdsh").write_text(_PDSH)
        (folder / "pdsh").chmod(0o755)
        slots = int(ranks) // NODES
        (folder / "hosts").write_text(
            "".join(f"node{number} slots={slots}\n" for number in range(NODES))
        )
        exported = {k: v for k, v in os.environ.items() if k.startswith(_EXPORTED)}
        (folder / "exported").write_text(
            "".join(f"{k}={shlex.quote(v)}\n" for k, v in exported.items())
        )
        options = ["--hostfile", str(folder / "hosts"), "--no_ssh_check", "--launcher", "pdsh"]
        options += ["--master_addr", "127.0.0.1", "--master_port", port]
        return subprocess.call(
            [sys.executable, "-m", "deepspeed.launcher.runner", *options, *program],
            env={
                **os.environ,
                "DS_ENV_FILE": str(folder / "exported"),
                "PATH": f"{folder}:{os.environ['PATH']}",
            },
        )


if __name__ == "__main__":
    sys.exit(main())
