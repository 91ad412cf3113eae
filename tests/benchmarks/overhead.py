"""What hangwatch costs, compared with the bare script and with tracing: ``python -m
tests.benchmarks.overhead [--quick] [--only WHAT]``.

Bare, watched, traced and printing jobs run at the same time and take turns, see `turns`. For a
training step the CPU time of all threads of the training processes is compared: on a shared
machine, wall time varies by more than the difference to be shown.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.server import running_server

from .nccl import (
    ACTIVATION_MB,
    MAX_MEMORY_PERCENT,
    iter_cost_rows,
    measure_nccl_costs,
    measure_peak_memory,
)
from .turns import (
    BARE,
    BARE_AGAIN,
    EMPTY_KERNEL,
    NATIVE,
    PYTHON,
    TRACE,
    WRAPPERS,
    Script,
    TurnBench,
    Variant,
    VariantFigures,
    add_only_option,
    compare_to_bare,
    describe_machine,
    format_percent,
    format_spread,
    median_of_sets,
    select_scripts,
)

MAX_CALL_US = {NATIVE.name: 0.5, PYTHON.name: 8.0}
MAX_STEP_PERCENT, MAX_RANK_MB, MAX_AGENT_MB = 2.0, 5.0, 80.0
OVER_LIMIT = "OVER"

_CALL_OPTIONS: dict[str, Any] = {
    "ranks": 1,
    "key": "call_ns",
    "unit": 1e3,
    "ways": (BARE, BARE_AGAIN, NATIVE, PYTHON),
}  # one rank, so that no time is spent waiting for others
NOTHING = Script(
    title="all_reduce, a backend that does nothing",
    what="calls",
    count=2_000,
    **{**_CALL_OPTIONS, "ways": (BARE, BARE_AGAIN, NATIVE, PYTHON, EMPTY_KERNEL)},
)
GLOO = Script(
    title="all_reduce on gloo, every 0.2 ms", what="gloo calls", count=250, **_CALL_OPTIONS
)
STEP = Script(
    title="DDP step, CPU time of the ranks", what="steps", count=5, ranks=2, key="cpu_s", unit=1e-3,
    ways=(BARE, BARE_AGAIN, NATIVE, PYTHON, WRAPPERS, TRACE),
)  # fmt: skip
SCRIPTS = (NOTHING, GLOO, STEP)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementPlan:
    """Sets of fresh processes, and turns of each."""

    sets: int = 5
    turns: int = 40


def format_row(
    label: str, value: str = "", added: str = "", limit: str = "", *, is_ok: bool | None = None
) -> str:
    verdict = "" if is_ok is None else "ok" if is_ok else OVER_LIMIT
    return f"{label:<46} {value:>11} {added:>11} {limit:>11}  {verdict}".rstrip()


def format_call_rows(
    script: Script, sets: Sequence[VariantFigures], *, with_limits: bool
) -> Iterator[str]:
    yield format_row(script.title, f"{median_of_sets(sets, BARE, script.key) / script.unit:.2f} µs")
    for way in script.ways[1:]:
        added = statistics.median(compare_to_bare(sets, way, script.key)[0]) / script.unit
        columns = (
            f"  {way.name}",
            f"{median_of_sets(sets, way, script.key) / script.unit:.2f} µs",
            f"{added:+.2f} µs",
        )
        limit = MAX_CALL_US.get(way.name) if with_limits else None
        yield (
            format_row(*columns)
            if limit is None
            else format_row(*columns, f"<= {limit:g} µs", is_ok=added <= limit)
        )


def format_step_rows(sets: Sequence[VariantFigures]) -> Iterator[str]:
    for key, name in (("cpu_s", STEP.title), ("wall_s", "DDP step, wall time")):
        yield format_row(name, f"{1e3 * median_of_sets(sets, BARE, key):.2f} ms")
        for way in STEP.ways[1:]:
            ratios = compare_to_bare(sets, way, key)[1]
            ratio = statistics.median(ratios)
            columns = (
                f"  {way.name}",
                f"{1e3 * median_of_sets(sets, way, key):.2f} ms",
                format_percent(ratio),
            )
            has_limit = key == "cpu_s" and way.watched
            yield (
                format_row(
                    *columns,
                    f"<= {MAX_STEP_PERCENT:g} %",
                    is_ok=100 * (ratio - 1) <= MAX_STEP_PERCENT,
                )
                if has_limit
                else format_row(*columns)
            )
            yield f"    {format_spread(ratios)} in {len(ratios)} sets of fresh processes"


def format_memory_rows(sets: Sequence[VariantFigures]) -> Iterator[str]:
    def median_mb(*ways: Variant) -> float:
        return statistics.median(
            fresh[way.name].final_numbers["resident_mb"] for fresh in sets for way in ways
        )

    yield format_row("memory of a training process", f"{median_mb(BARE):.1f} MB")
    for way in (BARE_AGAIN, NATIVE, PYTHON):
        added = median_mb(way) - (
            median_mb(BARE, BARE_AGAIN) if way.watched else median_mb(BARE)
        )  # two bare ones differ by megabytes: all of them count
        columns = (f"  {way.name}", f"{median_mb(way):.1f} MB", f"{added:+.1f} MB")
        yield (
            format_row(*columns, f"<= {MAX_RANK_MB:g} MB", is_ok=added <= MAX_RANK_MB)
            if way.watched
            else format_row(*columns)
        )
    agents = [fresh[way.name] for fresh in sets for way in (NATIVE, PYTHON)]
    max_agent_mb = max(columns.agent_mb for columns in agents)
    yield format_row(
        "memory of the node agent, one a host",
        f"{max_agent_mb:.1f} MB",
        "",
        f"<= {MAX_AGENT_MB:g} MB",
        is_ok=0 < max_agent_mb <= MAX_AGENT_MB,
    )
    share = statistics.median(columns.agent_core for columns in agents)
    yield format_row(
        "CPU of the node agent, its start included", f"{100 * share:.1f} %", "", "of a core"
    )


def format_peak_rows(peaks: Mapping[str, float]) -> Iterator[str]:
    bare_mb = peaks["none"]
    title = f"peak device memory, activations of {ACTIVATION_MB} MB"
    yield format_row(title, f"{bare_mb:.0f} MB")
    for recorder in ("native", "python"):
        ratio = peaks[recorder] / bare_mb
        yield format_row(
            f"  {recorder} recorder",
            f"{peaks[recorder]:.0f} MB",
            format_percent(ratio),
            f"<= {MAX_MEMORY_PERCENT:g} %",
            is_ok=100 * (ratio - 1) <= MAX_MEMORY_PERCENT,
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.overhead", description="What watching a training costs."
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer sets and turns: less precise numbers"
    )
    add_only_option(parser, SCRIPTS)
    parser.add_argument(
        "--nccl",
        metavar="VERSION",
        help="measure calls and memory on NCCL's process group instead, with this torch of tests.fakegpu;"
        " installed: with this interpreter's, on this machine's GPUs",
    )
    arguments = parser.parse_args(argv)
    plan = MeasurementPlan(sets=2, turns=30) if arguments.quick else MeasurementPlan()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # or the server would stay
    print(*describe_machine(), "", sep="\n")
    print(format_row("", "median", "added", "limit"), flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="hangwatch-overhead-") as folder,
        running_server(Path(folder, "server"), stall_after_s=60) as server,
    ):
        if arguments.nccl:
            costs = measure_nccl_costs(arguments.nccl, server, sets=plan.sets, turns=plan.turns)
            print(*(format_row(*row) for row in iter_cost_rows(costs)), sep="\n", flush=True)
            peaks = measure_peak_memory(arguments.nccl, server.loopback_url)
            rows = [*format_peak_rows(peaks)]
            print(*rows, sep="\n", flush=True)
            return 1 if any(line.endswith(OVER_LIMIT) for line in rows) else 0
        bench, is_over_limit = TurnBench(Path(folder), server), False
        for script in select_scripts(arguments, SCRIPTS):
            sets = bench.run_sets(script, plan.sets, plan.turns)
            rows = (
                [*format_step_rows(sets), *format_memory_rows(sets)]
                if script is STEP
                else [*format_call_rows(script, sets, with_limits=script is NOTHING)]
            )
            is_over_limit |= any(line.endswith(OVER_LIMIT) for line in rows)
            print(*rows, sep="\n", flush=True)
    print(
        "\nAdded: the median over all turns of a set of processes, each beside the bare script's;"
        " of several sets the median."
    )
    return 1 if is_over_limit else 0


if __name__ == "__main__":
    sys.exit(main())
