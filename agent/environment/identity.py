"""Parses the job and the rank of a process from the environment variables that its launcher set."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

MAX_JOB_NAME = 200  # characters
_NUMBER = re.compile("[0-9]{1,9}")

Environ = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchInfo:
    """The launcher's variables. ``rank`` is None if the process is not a rank."""

    job: str
    restart: int
    rank: int | None
    world_size: int
    local_rank: int | None
    # A wrapper script may set these for the rank alone, so they are not compared.
    on_hang: str = field(default="", compare=False)
    gpu_stacks: bool = field(default=False, compare=False)


# The number, the count and the number on the host of a task, as Open MPI, Slurm, and MPICH or Intel
# MPI call them.
_TASK_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)


def parse_environ(env: Environ, rendezvous: str = "") -> LaunchInfo:
    """Parses torchrun's variables, which accelerate sets as well, and Slurm's job id. The name of
    the job may come from ``rendezvous``, where its ranks meet if not at MASTER_ADDR.

    The variables of `parse_task` identify no rank by themselves.
    """
    rank = _parse_number(env, "RANK")
    if rank is None and env.get("NODE_RANK") == "0" and "WORLD_SIZE" in env:
        # Lightning's rank 0 starts the other ranks of the first node, with these variables. It sets them
        # in its own environment as well, which all its children inherit, so 0 identifies no rank. On
        # other nodes, the rank depends on the sizes of the nodes before.
        rank = _parse_number(env, "LOCAL_RANK") or None
    run_id = env.get("TORCHELASTIC_RUN_ID", "")
    if run_id == "none":  # torchrun's default, the same for every job
        run_id = ""
    slurm_job = env.get("SLURM_JOB_ID", "")
    if slurm_job:
        step = env.get("SLURM_STEP_ID", "")
        slurm_job = f"slurm-{slurm_job}.{step}" if step.isdigit() else f"slurm-{slurm_job}"
    master = f"{env.get('MASTER_ADDR', 'localhost')}:{env.get('MASTER_PORT', '0')}"
    name = env.get("HANGWATCH_JOB") or run_id or slurm_job or rendezvous or master
    return LaunchInfo(
        # The server accepts only printable names.
        job="".join(c if c.isprintable() else "?" for c in name[:MAX_JOB_NAME]),
        restart=_parse_number(env, "TORCHELASTIC_RESTART_COUNT") or 0,
        rank=rank,
        world_size=_parse_number(env, "WORLD_SIZE") or 0,
        local_rank=_parse_number(env, "LOCAL_RANK"),
        on_hang=env.get("HANGWATCH_ON_HANG", "")[:40],
        gpu_stacks=is_switched_on(env, "HANGWATCH_GPU_STACKS"),
    )


def parse_task(env: Environ) -> LaunchInfo | None:
    """A process started by ``mpirun`` or ``srun``, with its place among the tasks as its rank: it is a
    rank, or a launcher of ranks such as torchrun. None if neither started it, or if its launcher set
    RANK.
    """
    if "RANK" in env:
        return None
    for rank_name, size_name, local_name in _TASK_VARIABLES:
        rank = _parse_number(env, rank_name)
        size = _parse_number(env, size_name)
        if rank is not None and size:
            local_rank = _parse_number(env, local_name)
            launch = parse_environ(env)
            return replace(launch, rank=rank, world_size=size, local_rank=local_rank)
    return None


def is_switched_off(env: Environ) -> bool:
    """Whether HANGWATCH_DISABLE keeps a process from being recorded."""
    return is_switched_on(env, "HANGWATCH_DISABLE")


def is_switched_on(env: Environ, name: str) -> bool:
    return env.get(name, "0") not in ("", "0")


def _parse_number(env: Environ, name: str) -> int | None:
    """A number that a launcher may set, else None: the server refuses larger ones."""
    text = env.get(name, "")
    return int(text) if _NUMBER.fullmatch(text) else None
