"""What watching costs, beside the bare script and beside tracing it: ``python -m
tests.benchmarks.overhead [--quick] [--only WHAT]``.

Jobs that are bare, watched, traced and printed run at the same time and take turns, see `turns`. Of
a training step the CPU time is judged, with all threads of the training processes: wall time on a
shared machine spreads by more than what is to be shown.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.harness.server import serving

from .turns import (
    AGAIN,
    BARE,
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
)

MAX_CALL_US = {NATIVE.name: 0.5, PYTHON.name: 8.0}
MAX_STEP_PERCENT, MAX_RANK_MB, MAX_AGENT_MB = 2.0, 5.0, 80.0
OVER = "OVER"

_CALL = {
    "ranks": 1,
    "key": "call_ns",
    "unit": 1e3,
    "ways": (BARE, AGAIN, NATIVE, PYTHON),
}  # one rank, so that nobody is waited for
NOTHING = Script(
    title="all_reduce, a backend that does nothing", what="calls", count=2_000, **_CALL
)  # type: ignore[arg-type]
GLOO = Script(title="all_reduce on gloo, every 0.2 ms", what="gloo calls", count=250, **_CALL)  # type: ignore[arg-type]
STEP = Script(
    title="DDP step, CPU time of the ranks", what="steps", count=5, ranks=2, key="cpu_s", unit=1e-3,
    ways=(BARE, AGAIN, NATIVE, PYTHON, WRAPPERS, TRACE),
)  # fmt: skip
SCRIPTS = (NOTHING, GLOO, STEP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Sets of fresh processes, and turns of each."""

    sets: int = 5
    turns: int = 40


def row(
    what: str, value: str = "", added: str = "", limit: str = "", *, ok: bool | None = None
) -> str:
    judged = "" if ok is None else "ok" if ok else OVER
    return f"{what:<46} {value:>11} {added:>11} {limit:>11}  {judged}".rstrip()


def call_rows(script: Script, sets: Sequence[Fresh], *, limited: bool) -> Iterator[str]:
    yield row(script.title, f"{middle(sets, BARE, script.key) / script.unit:.2f} µs")
    for way in script.ways[1:]:
        added = statistics.median(compared(sets, way, script.key)[0]) / script.unit
        told = (
            f"  {way.name}",
            f"{middle(sets, way, script.key) / script.unit:.2f} µs",
            f"{added:+.2f} µs",
        )
        limit = MAX_CALL_US.get(way.name) if limited else None
        yield row(*told) if limit is None else row(*told, f"<= {limit:g} µs", ok=added <= limit)


def step_rows(sets: Sequence[Fresh]) -> Iterator[str]:
    for key, name in (("cpu_s", STEP.title), ("wall_s", "DDP step, wall time")):
        yield row(name, f"{1e3 * middle(sets, BARE, key):.2f} ms")
        for way in STEP.ways[1:]:
            ratios = compared(sets, way, key)[1]
            ratio = statistics.median(ratios)
            told = (f"  {way.name}", f"{1e3 * middle(sets, way, key):.2f} ms", percent(ratio))
            judged = key == "cpu_s" and way.watched
            yield (
                row(*told, f"<= {MAX_STEP_PERCENT:g} %", ok=100 * (ratio - 1) <= MAX_STEP_PERCENT)
                if judged
                else row(*told)
            )
            yield f"    {spread(ratios)} in {len(ratios)} sets of fresh processes"


def memory_rows(sets: Sequence[Fresh]) -> Iterator[str]:
    def mb(*ways: Way) -> float:
        return statistics.median(
            fresh[way.name].last["resident_mb"] for fresh in sets for way in ways
        )

    yield row("memory of a training process", f"{mb(BARE):.1f} MB")
    for way in (AGAIN, NATIVE, PYTHON):
        added = mb(way) - (
            mb(BARE, AGAIN) if way.watched else mb(BARE)
        )  # two bare ones differ by megabytes: all of them count
        told = (f"  {way.name}", f"{mb(way):.1f} MB", f"{added:+.1f} MB")
        yield (
            row(*told, f"<= {MAX_RANK_MB:g} MB", ok=added <= MAX_RANK_MB)
            if way.watched
            else row(*told)
        )
    agents = [fresh[way.name] for fresh in sets for way in (NATIVE, PYTHON)]
    most = max(told.agent_mb for told in agents)
    yield row(
        "memory of the node agent, one a host",
        f"{most:.1f} MB",
        "",
        f"<= {MAX_AGENT_MB:g} MB",
        ok=0 < most <= MAX_AGENT_MB,
    )
    share = statistics.median(told.agent_core for told in agents)
    yield row("CPU of the node agent, its start included", f"{100 * share:.1f} %", "", "of a core")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.overhead", description="What watching a training costs."
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer sets and turns: numbers that say less"
    )
    add_only(parser, SCRIPTS)
    told = parser.parse_args(argv)
    plan = Plan(sets=2, turns=30) if told.quick else Plan()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # or the server would stay
    print(*machine(), "", sep="\n")
    print(row("", "median", "added", "limit"), flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="hangwatch-overhead-") as folder,
        serving(Path(folder, "server"), stall_after=60) as server,
    ):
        bench, over = Bench(Path(folder), server), False
        for script in wanted(told, SCRIPTS):
            sets = bench.sets(script, plan.sets, plan.turns)
            rows = (
                [*step_rows(sets), *memory_rows(sets)]
                if script is STEP
                else [*call_rows(script, sets, limited=script is NOTHING)]
            )
            over |= any(line.endswith(OVER) for line in rows)
            print(*rows, sep="\n", flush=True)
    print(
        "\nAdded: the median over all turns of a set of processes, each beside the bare script's; of several sets the median."
    )
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
