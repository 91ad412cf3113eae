"""Which job and which rank a process belongs to, read from what its launcher put into the
environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchInfo:
    """What a launcher said. ``rank`` is None where it started no rank."""

    job: str
    restart: int
    rank: int | None
    world_size: int
    local_rank: int | None
    on_hang: str = field(
        default="", compare=False
    )  # a wrapper may set it for the rank alone, and is no other launcher for that


def parse_environ(env: Mapping[str, str]) -> LaunchInfo:
    """Reads torchrun's variables, which accelerate sets as well, and Slurm's job id.

    RANK alone makes a rank: SLURM_PROCID also numbers the torchrun processes that srun starts.
    """
    rank = _parse_number(env.get("RANK"))
    return LaunchInfo(
        job=_choose_job_name(env),
        restart=_parse_number(env.get("TORCHELASTIC_RESTART_COUNT")) or 0,
        rank=rank,
        world_size=_parse_number(env.get("WORLD_SIZE")) or 0,
        local_rank=_parse_number(env.get("LOCAL_RANK")),
        on_hang=env.get("HANGWATCH_ON_HANG", "")[:40],
    )


def _choose_job_name(env: Mapping[str, str]) -> str:
    if named := env.get("HANGWATCH_JOB"):
        return named
    run = env.get("TORCHELASTIC_RUN_ID", "")
    if run and run != "none":  # torchrun's default, the same for every job
        return run
    if slurm := env.get("SLURM_JOB_ID"):
        step = env.get("SLURM_STEP_ID", "")
        return f"slurm-{slurm}" + (f".{step}" if step.isdigit() else "")
    return f"{env.get('MASTER_ADDR', 'localhost')}:{env.get('MASTER_PORT', '0')}"


def _parse_number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
