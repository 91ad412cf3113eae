"""Compares hangwatch with the tools of PyTorch and Python in one table: ``python -m
tests.benchmarks.compare``.

The same small scripts run under each tool at the same time and take turns, see `turns`. On gloo the
native recorder always times calls; on the backend that does nothing, only on request.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.harness.server import running_server

from .turns import (
    BARE,
    BARE_AGAIN,
    BOTH,
    FLIGHT,
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
    without_flight_recorder,
)

NATIVE_TIMED = Variant(
    name="hangwatch, native, HANGWATCH_TIMING=1",
    env={**NATIVE.env, "HANGWATCH_TIMING": "1"},
    watched=True,
)
DETAIL = Variant(name="TORCH_DISTRIBUTED_DEBUG=DETAIL", env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
PLAIN = without_flight_recorder(BARE, BARE_AGAIN, NATIVE, PYTHON)

_CALL_OPTIONS = {"ranks": 1, "key": "call_ns", "unit": 1e3}
_STEP_OPTIONS = {
    "ranks": 2, "count": 5, "key": "cpu_s", "unit": 1e-3,
    "ways": (*PLAIN, FLIGHT, BOTH, *without_flight_recorder(DETAIL, WRAPPERS, TRACE)),
}  # fmt: skip
# The calls first: all_reduce on nothing shows what a kernel adds; on gloo it is what the Flight
# Recorder sees, too.
SCRIPTS = (
    Script(
        title="all_reduce on a backend that does nothing, µs", what="calls", count=2_000, ways=(*PLAIN, *without_flight_recorder(NATIVE_TIMED)),
        **_CALL_OPTIONS,  # type: ignore[arg-type]
    ),
    Script(
        title="all_reduce on gloo, µs", what="gloo calls", count=250, ways=(*PLAIN, FLIGHT, BOTH, *without_flight_recorder(DETAIL)),
        **_CALL_OPTIONS,  # type: ignore[arg-type]
    ),
    Script(title="DDP step, CPU time in ms", what="steps", **_STEP_OPTIONS),  # type: ignore[arg-type]
    Script(title="FSDP2 step, CPU time in ms", what="fsdp2 steps", **_STEP_OPTIONS),  # type: ignore[arg-type]
)  # fmt: skip


def format_rows(script: Script, sets: Sequence[VariantFigures]) -> Iterator[str]:
    """A line for each way: its median, and beside the bare script what it adds, in all and in parts
    of it.
    """
    timed = "wall_s" in sets[0][BARE.name].turns[0]
    yield (
        f"{script.title:<46} {'median':>9} {'added':>9} {'ratio':>10}  "
        f" {'in each set':<22}{' wall time' if timed else ''}"
    )
    for way in script.ways:
        if not any(way.name in fresh for fresh in sets):
            yield f"  {way.name:<44} does not bear this script"
            continue
        columns = f"{median_of_sets(sets, way, script.key) / script.unit:>9.3f}"
        if way.name != BARE.name:
            added, ratios = compare_to_bare(sets, way, script.key)
            columns += (
                f" {statistics.median(added) / script.unit:>+9.3f}"
                f" {format_percent(statistics.median(ratios)):>10}   {format_spread(ratios):<22}"
            )
            columns += (
                f" {format_percent(statistics.median(compare_to_bare(sets, way, 'wall_s')[1])):>9}"
                if timed
                else ""
            )
        yield f"  {way.name:<44} {columns}".rstrip()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.compare",
        description="hangwatch beside PyTorch's own tools.",
    )
    parser.add_argument("--sets", type=int, default=5, help="sets of fresh processes (5)")
    parser.add_argument("--turns", type=int, default=50, help="turns of each (50)")
    add_only_option(parser, SCRIPTS)
    arguments = parser.parse_args(argv)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # or the server would stay
    print(*describe_machine(), "", sep="\n")
    with (
        tempfile.TemporaryDirectory(prefix="hangwatch-compare-") as name,
        running_server(Path(name, "server"), stall_after_s=60) as server,
    ):
        bench = TurnBench(Path(name), server)
        for script in select_scripts(arguments, SCRIPTS):
            print(
                *format_rows(script, bench.run_sets(script, arguments.sets, arguments.turns)),
                "",
                sep="\n",
                flush=True,
            )
    print(
        "Added and ratio: the median over all turns of a set of processes, each beside the bare"
        " script's; of several sets the median."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
