"""What hangwatch and torch's Flight Recorder add to a call of NCCL's process group, and what reading
the Flight Recorder's counters costs. Runs on the stand-ins of `tests.fakegpu`, whose collectives
take no time, so that a call is what the host does; or on this machine's own GPUs.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hangwatch.agent.recorder.device import MAX_LOAD, STILL_INTERVAL_S
from hangwatch.agent.recorder.native.cache import get_cache_dir
from tests.harness.launchers import build_command
from tests.harness.native import build_plugin, build_recorder
from tests.harness.server import Server
from tests.zoo.nccl import nccl_runtime

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
    *(
        NcclVariant(
            name=f"native recorder, HANGWATCH_NCCL={level}",
            environment={
                **_RECORDER_OFF,
                "HANGWATCH_RECORDER": "native",
                "HANGWATCH_NCCL": level,
            },
            is_watched=True,
        )
        for level in ("calls", "device")
    ),
)
COST_RANKS = 2


@dataclass(frozen=True, slots=True)
class NcclCosts:
    """The median of each process and all readings of each variant, in nanoseconds."""

    call_ns: dict[str, list[float]] = field(default_factory=dict)
    graph_ns: dict[str, list[float]] = field(default_factory=dict)  # replays of a graph
    status_ns: list[float] = field(default_factory=list)
    dump_ns: list[float] = field(default_factory=list)


def compute_added_ns(times_ns: Mapping[str, list[float]], variant: NcclVariant) -> float:
    """What a variant adds to a call or a replay, each job compared with the bare one beside it."""
    pairs = zip(times_ns[variant.name], times_ns[BARE_VARIANT.name], strict=True)
    return statistics.median(time - bare for time, bare in pairs)


class NcclBench:
    """Runs programs on one torch, for which the native recorder and the plugin for NCCL are built: a
    version of tests.fakegpu on the stand-ins, or ``installed``, this interpreter's on this machine's GPUs.
    """

    def __init__(self, torch_version: str) -> None:
        self._runtime = nccl_runtime(torch_version)
        folder = get_cache_dir(os.environ)
        build_recorder(folder, self._runtime)
        build_plugin(folder, self._runtime)
        self._environment = {"OMP_NUM_THREADS": "1", **os.environ, **self._runtime.env}
        self._environment["HANGWATCH_CACHE_DIR"] = str(folder)

    def run_program(
        self, program: Path, ranks: int, args: Sequence[str], env: Mapping[str, str]
    ) -> dict[str, Any]:
        """What rank 0 prints. Raises subprocess.SubprocessError."""
        command, variables = build_command(
            self._runtime.choose_launcher("torchrun"),
            program,
            ranks,
            args=args,
            python=self._runtime.python,
        )
        done = subprocess.run(
            command,
            env={**self._environment, **variables, **env},
            check=True,
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
        )
        line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
        figures: dict[str, Any] = json.loads(line)
        return figures


def measure_peak_memory(torch_version: str, url: str) -> dict[str, float]:
    """The peak device memory in MiB of a DDP training with large activations: without hangwatch, and
    with each recorder, by their names. Raises subprocess.SubprocessError, and ValueError if another
    recorder recorded.
    """
    bench = NcclBench(torch_version)
    peaks: dict[str, float] = {}
    for recorder in ("none", "native", "python"):
        watched = {} if recorder == "none" else {"HANGWATCH_URL": url}
        figures = bench.run_program(
            MEMORY_PROGRAM,
            MEMORY_RANKS,
            [str(MEMORY_STEPS), str(ACTIVATION_MB)],
            {**watched, "HANGWATCH_RECORDER": recorder},
        )
        if figures["recorder"] != recorder:
            raise ValueError(f"{recorder} is to be measured, {figures['recorder']} recorded")
        peaks[recorder] = figures["peak_mb"]
    return peaks


def measure_nccl_costs(
    torch_version: str, server: Server, sets: int = 3, turns: int = 40
) -> NcclCosts:
    """Runs each variant ``sets`` times, in turns. Raises subprocess.SubprocessError."""
    bench = NcclBench(torch_version)
    costs = NcclCosts()
    for _ in range(sets):
        for variant in NCCL_VARIANTS:
            watched = {"HANGWATCH_URL": server.loopback_url} if variant.is_watched else {}
            figures = bench.run_program(
                PROGRAM,
                COST_RANKS,
                [str(turns), str(CALLS_PER_TURN)],
                {**variant.environment, **watched},
            )
            for key, times_ns in (("call_ns", costs.call_ns), ("graph_ns", costs.graph_ns)):
                times_ns.setdefault(variant.name, []).append(statistics.median(figures[key]))
            costs.status_ns.extend(figures["status_ns"])
            costs.dump_ns.extend(figures["dump_ns"])
    return costs


def iter_cost_rows(costs: NcclCosts) -> Iterator[tuple[str, str, str, str]]:
    """(label, median, added, limit) for each row of the table."""
    for title, times_ns in (
        ("all_reduce on NCCL's process group", costs.call_ns),
        ("replay of a CUDA graph with 200 of them", costs.graph_ns),
    ):
        for variant in NCCL_VARIANTS:
            median_us = statistics.median(times_ns[variant.name]) / 1e3
            is_bare = variant is BARE_VARIANT
            label = title if is_bare else f"  {variant.name}"
            added = "" if is_bare else f"{compute_added_ns(times_ns, variant) / 1e3:+.2f} µs"
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
