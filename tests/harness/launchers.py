"""The ways in which people start a job: the command line of each."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from pathlib import Path

# Each rank by hand, as in a user's own shell script; it ends with a status of 1 where one of
# them does not end well.
_PLAIN_LAUNCH_SCRIPT = (
    'n=$1; shift; rank=0; pids=""\n'
    'while [ $rank -lt $n ]; do RANK=$rank "$@" & pids="$pids $!"; rank=$((rank + 1)); done\n'
    "status=0; for pid in $pids; do wait $pid || status=1; done; exit $status"
)


def build_command(
    launcher: str,
    program: Path,
    ranks: int,
    *,
    args: Sequence[str] = (),
    max_restarts: int = 0,
    python: str = sys.executable,
) -> tuple[list[str], dict[str, str]]:
    """The command line that starts `program` with the interpreter `python`, and what it needs in its environment.

    ``torchrun``; ``spawn``, where the program starts its ranks itself; ``ray``, where it has Ray do that; ``plain``, a process per
    rank with RANK set; ``accelerate``, the launcher of that name. Raises ValueError for any other.
    """
    script = [str(program), *args]
    if launcher == "torchrun":
        options = [
            "--standalone",
            "--nproc-per-node",
            str(ranks),
            "--max-restarts",
            str(max_restarts),
        ]
        return [python, "-m", "torch.distributed.run", *options, *script], {}
    if launcher in ("spawn", "ray"):
        return [python, *script], {}
    if launcher == "plain":
        port = str(_find_free_port())
        started = ["sh", "-c", _PLAIN_LAUNCH_SCRIPT, "sh", str(ranks), python, *script]
        return started, {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if launcher == "accelerate":
        # It starts several processes for GPUs only; the programs themselves use the CPU.
        options = ["--multi_gpu", "--num_processes", str(ranks), "--num_machines", "1"]
        options += ["--mixed_precision", "no", "--dynamo_backend", "no"]
        options += ["--main_process_port", str(_find_free_port())]
        return [python, "-m", "accelerate.commands.launch", *options, *script], {}
    raise ValueError(
        f"no launcher {launcher!r}: there are torchrun, spawn, ray, plain and accelerate"
    )


def _find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
