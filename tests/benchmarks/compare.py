"""hangwatch beside what PyTorch and Python offer, in one table: ``python -m tests.benchmarks.compare``.

Each runs the same small scripts in fresh processes, one after the other, in rounds that begin with another one each time; what is
printed of each is the median over the rounds of its ratio to the bare script of the same round.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.harness import native
from tests.harness.job import running
from tests.harness.server import Server, serving

from .overhead import WORKLOAD, Numbers, machine

BARE, NATIVE, PYTHON, FLIGHT = "bare", "hangwatch, native recorder", "hangwatch, Python recorder", "Flight Recorder"
TIMED = "hangwatch, native, HANGWATCH_TIMING=1"
DETAIL = "TORCH_DISTRIBUTED_DEBUG=DETAIL"
_FLIGHT = {"TORCH_FR_BUFFER_SIZE": "2000"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a script is run."""

    name: str
    env: Mapping[str, str] = field(default_factory=dict)
    watched: bool = False
    slow: bool = False  # by so much that a few rounds show it


WAYS = (
    Way(name=BARE),
    Way(name=NATIVE, env={"HANGWATCH_RECORDER": "native"}, watched=True),
    # On gloo it times calls anyway; those of the backend that does nothing only when it is asked to.
    Way(name=TIMED, env={"HANGWATCH_RECORDER": "native", "HANGWATCH_TIMING": "1"}, watched=True),
    Way(name=PYTHON, env={"HANGWATCH_RECORDER": "python"}, watched=True),
    Way(name=FLIGHT, env=_FLIGHT),
    Way(name="both: native and Flight Recorder", env={"HANGWATCH_RECORDER": "native", **_FLIGHT}, watched=True),
    Way(name=DETAIL, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, slow=True),
    Way(name="wrappers that print shape, dtype, mean", env={"BENCHMARK_UNDER": "wrappers"}, slow=True),
    Way(name="trace.Trace", env={"BENCHMARK_UNDER": "trace"}, slow=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What is run: ``what`` of the workload, ``count`` times; ``key`` is the number looked at, ``unit`` of them are shown as one."""

    title: str
    what: str
    count: int
    ranks: int
    rounds: int
    key: str
    unit: float
    ways: tuple[Way, ...]


def scripts(times: int, ways: tuple[Way, ...]) -> Iterator[Script]:
    """The calls first: all_reduce on nothing shows what a kernel adds; on gloo it is what the Flight Recorder sees, too."""
    kernels = tuple(way for way in ways if way.name in (BARE, NATIVE, TIMED, PYTHON))
    ways = tuple(way for way in ways if way.name != TIMED)
    calls = tuple(way for way in ways if not way.slow or way.name == DETAIL)
    call = {"ranks": 1, "rounds": times, "key": "call_ns", "unit": 1e3}
    yield Script(title="all_reduce on a backend that does nothing, µs", what="calls", count=20_000, ways=kernels, **call)  # type: ignore[arg-type]
    yield Script(title="all_reduce on gloo, µs", what="gloo calls", count=5_000, ways=calls, **call)  # type: ignore[arg-type]
    step = {"count": 100, "ranks": 2, "rounds": times, "key": "cpu_s", "unit": 1e-3, "ways": ways}
    yield Script(title="DDP step, CPU time in ms", what="steps", **step)  # type: ignore[arg-type]
    yield Script(title="FSDP2 step, CPU time in ms", what="fsdp2 steps", **step)  # type: ignore[arg-type]


@dataclass(slots=True)
class Bench:
    folder: Path
    server: Server
    _runs: int = 0

    def run(self, script: Script, way: Way) -> Numbers | None:
        """The means over the ranks of one run; None where the way does not bear the script."""
        self._runs += 1
        folder = self.folder / f"run{self._runs}"
        env = {"BENCHMARK_OUT": str(folder), "HANGWATCH_CACHE_DIR": str(self.folder / "recorder"), **way.env}
        url = self.server.url if way.watched else None
        with running(WORKLOAD, script.ranks, folder, url, name=folder.name, env=env, args=[script.what, str(script.count)]) as job:
            job.process.wait(300.0)
        found = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
        if job.process.returncode or len(found) != script.ranks:
            if way.watched or not way.env:
                raise RuntimeError(f"{script.what} failed: {job.stderr[-2000:]}")
            return None
        if way.watched and {bool(numbers["native"]) for numbers in found} != {way.env["HANGWATCH_RECORDER"] == "native"}:
            raise RuntimeError(f"{way.name} did not record: {job.stderr[-2000:]}")
        (folder / "stdout").unlink()  # a traced run writes many megabytes
        return {name: statistics.mean(numbers[name] for numbers in found) for name in (script.key, "wall_s") if name in found[0]}

    def rounds(self, script: Script) -> dict[str, list[Numbers]]:
        """By way, a run for each round; the slow ways only in the first two."""
        found: dict[str, list[Numbers]] = {way.name: [] for way in script.ways}
        for turn in range(script.rounds):
            begin = turn % len(script.ways)
            for way in (*script.ways[begin:], *script.ways[:begin]):
                if sys.stderr.isatty():
                    print(f"\r\033[K{script.what}: round {turn + 1} of {script.rounds}, {way.name}", end="", file=sys.stderr, flush=True)
                if (not way.slow or turn < 2) and (numbers := self.run(script, way)) is not None:
                    found[way.name].append(numbers)
        return found


def rows(script: Script, found: Mapping[str, Sequence[Numbers]]) -> Iterator[str]:
    """A line for each way: the median, and beside the bare one of its round what it adds, in all and in parts of it."""
    timed = "wall_s" in found[BARE][0]
    yield f"{script.title:<46} {'median':>9} {'added':>9} {'ratio':>9}{'  wall time' if timed else ''}"
    for way in script.ways:
        if not found[way.name]:
            yield f"  {way.name:<44} does not bear this script"
            continue
        pairs = list(zip(found[way.name], found[BARE], strict=False))
        told = f"{statistics.median(mine[script.key] for mine, _ in pairs) / script.unit:>9.3f}"
        if way.name != BARE:
            told += f" {statistics.median(mine[script.key] - bare[script.key] for mine, bare in pairs) / script.unit:>+9.3f}"
            told += "".join(f" {_percent(pairs, key):>+8.1f} %" for key in (script.key, "wall_s")[: 1 + timed])
        yield f"  {way.name:<44} {told}"
    alone = [numbers[script.key] for numbers in found[BARE]]
    least, most = (100 * (end / statistics.median(alone) - 1) for end in (min(alone), max(alone)))
    yield f"  the bare script against itself: {least:+.1f} to {most:+.1f} %, {len(alone)} runs"


def _percent(pairs: Sequence[tuple[Numbers, Numbers]], key: str) -> float:
    return 100 * (statistics.median(mine[key] / bare[key] for mine, bare in pairs) - 1)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.compare", description="hangwatch beside PyTorch's own tools.")
    parser.add_argument("--rounds", type=int, default=8, help="runs of each (8); of the slow ways two")
    parser.add_argument("--only", action="append", metavar="WHAT", help="a script, as 'calls' or 'steps'; repeatable")
    parser.add_argument("--way", action="append", metavar="PART", help="only the ways that have this in their name, and bare; repeatable")
    told = parser.parse_args(argv)
    ways = tuple(way for way in WAYS if way.name == BARE or not told.way or any(part in way.name for part in told.way))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # or the server would stay
    print(*machine(), "", sep="\n")
    with tempfile.TemporaryDirectory(prefix="hangwatch-compare-") as name, serving(Path(name, "server"), stall_after=60) as server:
        bench = Bench(Path(name), server)
        native.build(Path(name, "recorder"))
        for script in scripts(told.rounds, ways):
            if not told.only or script.what in told.only:
                print(*rows(script, bench.rounds(script)), "", sep="\n", flush=True)
    print("Medians over rounds of fresh runs, each beside the bare run of its round.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
