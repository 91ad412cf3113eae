"""hangwatch beside what PyTorch and Python offer, in one table: ``python -m
tests.benchmarks.compare``.

The same small scripts run under each at the same time and take turns, see `turns`. On gloo the
native recorder times calls anyway; those of the backend that does nothing only when it is asked to.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.harness.server import serving

from .turns import (
    AGAIN,
    BARE,
    BOTH,
    FLIGHT,
    NATIVE,
    PYTHON,
    TRACE,
    WRAPPERS,
    Bench,
    Fresh,
    Script,
    Way,
    add_only,
    compared,
    machine,
    middle,
    percent,
    spread,
    wanted,
    without_flight_recorder,
)

TIMED = Way(
    name="hangwatch, native, HANGWATCH_TIMING=1",
    env={**NATIVE.env, "HANGWATCH_TIMING": "1"},
    watched=True,
)
DETAIL = Way(name="TORCH_DISTRIBUTED_DEBUG=DETAIL", env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
PLAIN = without_flight_recorder(BARE, AGAIN, NATIVE, PYTHON)

_CALL = {"ranks": 1, "key": "call_ns", "unit": 1e3}
_STEP = {
    "ranks": 2, "count": 5, "key": "cpu_s", "unit": 1e-3,
    "ways": (*PLAIN, FLIGHT, BOTH, *without_flight_recorder(DETAIL, WRAPPERS, TRACE)),
}  # fmt: skip
# The calls first: all_reduce on nothing shows what a kernel adds; on gloo it is what the Flight
# Recorder sees, too.
SCRIPTS = (
    Script(
        title="all_reduce on a backend that does nothing, µs", what="calls", count=2_000, ways=(*PLAIN, *without_flight_recorder(TIMED)),
        **_CALL,  # type: ignore[arg-type]
    ),
    Script(
        title="all_reduce on gloo, µs", what="gloo calls", count=250, ways=(*PLAIN, FLIGHT, BOTH, *without_flight_recorder(DETAIL)),
        **_CALL,  # type: ignore[arg-type]
    ),
    Script(title="DDP step, CPU time in ms", what="steps", **_STEP),  # type: ignore[arg-type]
    Script(title="FSDP2 step, CPU time in ms", what="fsdp2 steps", **_STEP),  # type: ignore[arg-type]
)  # fmt: skip


def rows(script: Script, sets: Sequence[Fresh]) -> Iterator[str]:
    """A line for each way: its median, and beside the bare script what it adds, in all and in parts
    of it.
    """
    timed = "wall_s" in sets[0][BARE.name].turns[0]
    yield f"{script.title:<46} {'median':>9} {'added':>9} {'ratio':>10}   {'in each set':<22}{' wall time' if timed else ''}"
    for way in script.ways:
        if not any(way.name in fresh for fresh in sets):
            yield f"  {way.name:<44} does not bear this script"
            continue
        told = f"{middle(sets, way, script.key) / script.unit:>9.3f}"
        if way.name != BARE.name:
            added, ratios = compared(sets, way, script.key)
            told += f" {statistics.median(added) / script.unit:>+9.3f} {percent(statistics.median(ratios)):>10}   {spread(ratios):<22}"
            told += (
                f" {percent(statistics.median(compared(sets, way, 'wall_s')[1])):>9}"
                if timed
                else ""
            )
        yield f"  {way.name:<44} {told}".rstrip()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.compare",
        description="hangwatch beside PyTorch's own tools.",
    )
    parser.add_argument("--sets", type=int, default=5, help="sets of fresh processes (5)")
    parser.add_argument("--turns", type=int, default=50, help="turns of each (50)")
    add_only(parser, SCRIPTS)
    told = parser.parse_args(argv)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # or the server would stay
    print(*machine(), "", sep="\n")
    with (
        tempfile.TemporaryDirectory(prefix="hangwatch-compare-") as name,
        serving(Path(name, "server"), stall_after=60) as server,
    ):
        bench = Bench(Path(name), server)
        for script in wanted(told, SCRIPTS):
            print(
                *rows(script, bench.sets(script, told.sets, told.turns)), "", sep="\n", flush=True
            )
    print(
        "Added and ratio: the median over all turns of a set of processes, each beside the bare script's; of several sets the median."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
