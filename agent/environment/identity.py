"""Parses the job and the rank of a process from the environment variables that its launcher set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

MAX_JOB_NAME = 200  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchInfo:
    """The launcher's variables. ``rank`` is None if the process is not a rank."""

    job: str
    restart: int
    rank: int | None
    world_size: int
    local_rank: int | None
    # A wrapper script may set this for the rank alone, so it is not compared.
    on_hang: str = field(default="", compare=False)


# The number, the count and the number on the host of a task, as Open MPI, Slurm, and MPICH or Intel
# MPI call them.
_TASK_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)


def parse_environ(env: Mapping[str, str], rendezvous: str = "") -> LaunchInfo:
    """Parses torchrun's variables, which accelerate sets as well, and Slurm's job id. The name of
    the job may come from ``rendezvous``, where its ranks meet if not at MASTER_ADDR.

    The variables of `parse_task` identify no rank by themselves.
    """
    rank = _parse_number(env.get("RANK"))
    if rank is None:
        rank = _parse_lightning_rank(env)
    name = _find_job_name(env, rendezvous)[:MAX_JOB_NAME]
    return LaunchInfo(
        # The server accepts only printable names.
        job="".join(c if c.isprintable() else "?" for c in name),
        restart=_parse_number(env.get("TORCHELASTIC_RESTART_COUNT")) or 0,
        rank=rank,
        world_size=_parse_number(env.get("WORLD_SIZE")) or 0,
        local_rank=_parse_number(env.get("LOCAL_RANK")),
        on_hang=env.get("HANGWATCH_ON_HANG", "")[:40],
    )


def parse_task(env: Mapping[str, str]) -> LaunchInfo | None:
    """A process started by ``mpirun`` or ``srun``, with its place among the tasks as its rank: it is a
    rank, or a launcher of ranks such as torchrun. None if neither started it, or if its launcher set
    RANK.
    """
    if "RANK" in env:
        return None
    for rank_name, size_name, local_name in _TASK_VARIABLES:
        rank, size = _parse_number(env.get(rank_name)), _parse_number(env.get(size_name))
        if rank is not None and size:
            local_rank = _parse_number(env.get(local_name))
            launch = parse_environ(env)
            return replace(launch, rank=rank, world_size=size, local_rank=local_rank)
    return None


def is_switched_off(env: Mapping[str, str]) -> bool:
    """Whether HANGWATCH_DISABLE keeps a process from being recorded."""
    return env.get("HANGWATCH_DISABLE", "0") not in ("", "0")


def _parse_lightning_rank(env: Mapping[str, str]) -> int | None:
    """The rank of a process that Lightning's launcher started on the first node: rank 0 starts the
    others there, with LOCAL_RANK and NODE_RANK. It sets them in its own environment as well, which
    all its children inherit, so 0 identifies no rank. On other nodes, it depends on their size.
    """
    if env.get("NODE_RANK") != "0" or "WORLD_SIZE" not in env:
        return None
    return _parse_number(env.get("LOCAL_RANK")) or None


def _find_job_name(env: Mapping[str, str], rendezvous: str) -> str:
    explicit_name = env.get("HANGWATCH_JOB")
    if explicit_name:
        return explicit_name
    run_id = env.get("TORCHELASTIC_RUN_ID", "")
    if run_id and run_id != "none":  # torchrun's default, the same for every job
        return run_id
    slurm_id = env.get("SLURM_JOB_ID")
    if slurm_id:
        step = env.get("SLURM_STEP_ID", "")
        return f"slurm-{slurm_id}.{step}" if step.isdigit() else f"slurm-{slurm_id}"
    if rendezvous:
        return rendezvous
    return f"{env.get('MASTER_ADDR', 'localhost')}:{env.get('MASTER_PORT', '0')}"


def _parse_number(text: str | None) -> int | None:
    """A number that a launcher may set, else None: the server refuses larger ones."""
    is_number = text is not None and text.isascii() and text.isdigit() and len(text) <= 9
    return int(text) if text is not None and is_number else None
