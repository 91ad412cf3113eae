"""The ways in which people start a job: the command line of each."""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

# Each rank by hand, as in a user's own shell script; it ends with a status of 1 where one of
# them does not end well. {} is replaced by the variables that number it.
_LAUNCH_SCRIPT = (
    'n=$1; shift; rank=0; pids=""\n'
    'while [ $rank -lt $n ]; do {} "$@" & pids="$pids $!"; rank=$((rank + 1)); done\n'
    "status=0; for pid in $pids; do wait $pid || status=1; done; exit $status"
)
_DEEPSPEED_NODES = Path(__file__).with_name("deepspeed_nodes.py")
_TORCHRUN_NODES = Path(__file__).with_name("torchrun_nodes.py")


class MissingLauncherError(Exception):
    """The launcher is not installed. The message says how to install it."""


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
    rank with RANK set; ``srun``, a process per rank with Slurm's variables; ``mpirun``, Open MPI's; ``accelerate`` and ``deepspeed``,
    the launchers of these names; ``deepspeed-nodes``, the latter on two nodes; ``torchrun-nodes`` and ``plain-nodes``, with a node
    for each rank as far as NCCL can tell. Raises ValueError for any other, and MissingLauncherError if Open MPI is not installed.
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
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_find_free_port())}
    if launcher in ("plain", "plain-nodes"):
        node = " LOCAL_RANK=0 NCCL_HOSTID=node$rank NCCL_SOCKET_IFNAME=lo"
        shell_script = _LAUNCH_SCRIPT.format("RANK=$rank" + (node if launcher != "plain" else ""))
        started = ["sh", "-c", shell_script, "sh", str(ranks), python, *script]
        return started, {"WORLD_SIZE": str(ranks), **master}
    if launcher == "srun":
        shell_script = _LAUNCH_SCRIPT.format("SLURM_PROCID=$rank SLURM_LOCALID=$rank")
        started = ["sh", "-c", shell_script, "sh", str(ranks), python, *script]
        count = {"SLURM_NTASKS": str(ranks), "SLURM_STEP_NUM_TASKS": str(ranks)}
        return started, {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", **count, **master}
    if launcher == "mpirun":
        if shutil.which("mpirun") is None:
            raise MissingLauncherError("mpirun is not installed: apt-get install openmpi-bin")
        options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        return ["mpirun", *options, "-np", str(ranks), python, *script], master
    if launcher == "deepspeed":
        options = ["--num_gpus", str(ranks), "--master_port", master["MASTER_PORT"]]
        return [python, "-m", "deepspeed.launcher.runner", *options, *script], {}
    if launcher == "torchrun-nodes":
        return [python, str(_TORCHRUN_NODES), str(ranks), master["MASTER_PORT"], *script], {}
    if launcher == "deepspeed-nodes":
        return [python, str(_DEEPSPEED_NODES), str(ranks), master["MASTER_PORT"], *script], {}
    if launcher == "accelerate":
        # It starts several processes for GPUs only; the programs themselves use the CPU.
        options = ["--multi_gpu", "--num_processes", str(ranks), "--num_machines", "1"]
        options += ["--mixed_precision", "no", "--dynamo_backend", "no"]
        options += ["--main_process_port", master["MASTER_PORT"]]
        return [python, "-m", "accelerate.commands.launch", *options, *script], {}
    raise ValueError(f"no launcher {launcher!r}: see build_command")


def _find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
