"""What hangwatch and torch's Flight Recorder add to a call of NCCL's process group, and what reading
the Flight Recorder's counters costs. Runs on the stand-ins of `tests.fakegpu`, whose collectives
take no time: so a call is what the host does.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hangwatch.agent.recorder.device import MAX_LOAD, STILL_INTERVAL_S
from hangwatch.agent.recorder.native.build import get_build_command
from tests.fakegpu.environment import environment_folder
from tests.fakegpu.launch import job_environment, torchrun_command
from tests.harness.environments import python_of
from tests.harness.server import Server

_PROGRAMS = Path(__file__).parents[1] / "fakegpu" / "programs"
PROGRAM = _PROGRAMS / "call_cost.py"
MEMORY_PROGRAM = _PROGRAMS / "training_memory.py"
MEMORY_RANKS, MEMORY_STEPS, ACTIVATION_MB = 2, 60, 128
MAX_MEMORY_PERCENT = 2.0
CALLS_PER_TURN = 200
RUN_TIMEOUT_S = 300
_RECORDER_OFF = {"TORCH_FR_BUFFER_SIZE": "0"}
_RECORDER_ON = {"TORCH_FR_BUFFER_SIZE": "2000"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclVariant:
    name: str
    environment: Mapping[str, str]
    is_watched: bool = False


BARE_VARIANT = NcclVariant(name="bare", environment=_RECORDER_OFF)
NCCL_VARIANTS = (
    BARE_VARIANT,
    NcclVariant(name="Flight Recorder", environment=_RECORDER_ON),
    NcclVariant(
        name="native recorder",
        environment={**_RECORDER_OFF, "HANGWATCH_RECORDER": "native"},
        is_watched=True,
    ),
    NcclVariant(
        name="Python recorder",
        environment={**_RECORDER_OFF, "HANGWATCH_RECORDER": "python"},
        is_watched=True,
    ),
)


@dataclass(frozen=True, slots=True)
class NcclCosts:
    """The median of each process and all readings of each variant, in nanoseconds."""

    call_ns: dict[str, list[float]] = field(default_factory=dict)
    status_ns: list[float] = field(default_factory=list)
    dump_ns: list[float] = field(default_factory=list)

    def median_added_ns(self, variant: NcclVariant) -> float:
        """What a variant adds to a call, each process compared with the bare one beside it."""
        pairs = zip(self.call_ns[variant.name], self.call_ns[BARE_VARIANT.name], strict=True)
        return statistics.median(call - bare for call, bare in pairs)


def prepare_environment(torch_version: str) -> dict[str, str]:
    """The environment of a job on the stand-ins, for which the native recorder is built."""
    environment = job_environment(torch_version)
    build_command = [str(python_of(environment_folder(torch_version))), *get_build_command()[1:]]
    subprocess.run(build_command, env=environment, check=True, capture_output=True)
    return environment


def measure_peak_memory(torch_version: str, url: str) -> dict[str, float]:
    """The peak device memory in MiB of a DDP training with large activations: without hangwatch, and
    with each recorder, by their names. Raises subprocess.SubprocessError, and ValueError if another
    recorder recorded.
    """
    environment = prepare_environment(torch_version)
    peaks: dict[str, float] = {}
    for recorder in ("none", "native", "python"):
        watched = {} if recorder == "none" else {"HANGWATCH_URL": url}
        done = subprocess.run(
            torchrun_command(
                torch_version,
                MEMORY_RANKS,
                MEMORY_PROGRAM,
                [str(MEMORY_STEPS), str(ACTIVATION_MB)],
            ),
            env={**environment, **watched, "HANGWATCH_RECORDER": recorder},
            check=True,
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
        )
        figures = json.loads(
            next(line for line in done.stdout.splitlines() if line.startswith("{"))
        )
        if figures["recorder"] != recorder:
            raise ValueError(f"{recorder} is to be measured, {figures['recorder']} recorded")
        peaks[recorder] = figures["peak_mb"]
    return peaks


def measure_nccl_costs(
    torch_version: str, server: Server, sets: int = 3, turns: int = 40
) -> NcclCosts:
    """Runs each variant ``sets`` times, in turns. Raises subprocess.SubprocessError."""
    environment = prepare_environment(torch_version)
    costs = NcclCosts()
    for _ in range(sets):
        for variant in NCCL_VARIANTS:
            watched = {"HANGWATCH_URL": server.loopback_url} if variant.is_watched else {}
            done = subprocess.run(
                torchrun_command(torch_version, 1, PROGRAM, [str(turns), str(CALLS_PER_TURN)]),
                env={**environment, **variant.environment, **watched},
                check=True,
                capture_output=True,
                text=True,
                timeout=RUN_TIMEOUT_S,
            )
            figures = json.loads(
                next(line for line in done.stdout.splitlines() if line.startswith("{"))
            )
            median_ns = statistics.median(figures["call_ns"])
            costs.call_ns.setdefault(variant.name, []).append(median_ns)
            costs.status_ns.extend(figures["status_ns"])
            costs.dump_ns.extend(figures["dump_ns"])
    return costs


def iter_cost_rows(costs: NcclCosts) -> Iterator[tuple[str, str, str, str]]:
    """(label, median, added, limit) for each row of the table."""
    for variant in NCCL_VARIANTS:
        median_us = statistics.median(costs.call_ns[variant.name]) / 1e3
        is_bare = variant is BARE_VARIANT
        label = "all_reduce on NCCL's process group" if is_bare else f"  {variant.name}"
        added = "" if is_bare else f"{costs.median_added_ns(variant) / 1e3:+.2f} µs"
        yield label, f"{median_us:.2f} µs", added, ""
    status_ms = statistics.median(costs.status_ns) / 1e6
    share = status_ms / 1e3 / STILL_INTERVAL_S
    yield (
        "reading the Flight Recorder's counters",
        f"{status_ms:.3f} ms",
        f"{100 * share:.3f} %",
        f"<= {100 * MAX_LOAD:g} %",
    )
    yield (
        "  and its calls, which hangwatch does not",
        f"{statistics.median(costs.dump_ns) / 1e6:.1f} ms",
        "",
        "",
    )
