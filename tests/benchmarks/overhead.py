"""What watching costs, beside the bare script and beside tracing it: ``python -m tests.benchmarks.overhead [--quick]``.

Every number comes from fresh processes, bare and watched in turn, the order swapped each time, so that a machine that gets slower
meanwhile favours neither. Wall time on a shared machine spreads by more than what is to be shown; CPU time of the training
processes, with all their threads, does not wait for neighbours.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from tests.harness.job import running
from tests.harness.processes import agents
from tests.harness.server import Server, serving

WORKLOAD = Path(__file__).with_name("workload.py")
MAX_CALL_US, MAX_STEP_PERCENT, MAX_RANK_MB, MAX_AGENT_MB = 8.0, 2.0, 5.0, 80.0
RANKS = 2  # of the training; the collectives run on one rank, so that nobody is waited for

Numbers = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much of each to do."""

    pairs: int = 16  # of the training
    call_pairs: int = 4
    calls: int = 20_000
    steps: int = 100
    traced_pairs: int = 2
    traced_steps: int = 30


QUICK = Plan(pairs=3, call_pairs=3, calls=5_000, steps=60, traced_pairs=1, traced_steps=20)


@dataclass(slots=True)
class Bench:
    """Runs the workload in fresh processes, and weighs the node agents of the runs that are watched."""

    folder: Path
    server: Server
    agent_mb: list[float] = field(default_factory=list)
    agent_cores: list[float] = field(default_factory=list)
    _runs: int = 0

    def run(self, what: str, count: int, *, ranks: int, watched: bool, under: str = "") -> Numbers:
        """The means over the ranks of one run. Raises RuntimeError where it failed."""
        self._runs += 1
        folder = self.folder / f"run{self._runs}"
        env = {"BENCHMARK_OUT": str(folder), "BENCHMARK_UNDER": under}
        url = self.server.url if watched else None
        with running(WORKLOAD, ranks, folder, url, name=f"run{self._runs}", env=env, args=[what, str(count)]) as job:
            weighed: list[tuple[float, float]] = []
            while job.process.poll() is None:
                weighed += [weight for pid in agents(job.run_dir) if (weight := _weight(pid)) is not None]
                time.sleep(0.1)
        if weighed:
            self.agent_mb.append(max(mb for mb, _ in weighed))
            self.agent_cores.append(weighed[-1][1])
        found = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
        if len(found) != ranks:
            raise RuntimeError(f"{what} failed: {job.stderr[-2000:]}")
        (folder / "stdout").unlink()  # a traced run writes many megabytes
        return {name: statistics.mean(numbers[name] for numbers in found) for name in found[0]}

    def pairs(self, what: str, count: int, *, ranks: int, times: int) -> list[tuple[Numbers, Numbers]]:
        """Bare and watched runs, one after the other, the first of a pair in turn."""
        found = []
        for turn in range(times):
            _note(f"{what}: pair {turn + 1} of {times}")
            order = (False, True) if turn % 2 else (True, False)
            runs = {watched: self.run(what, count, ranks=ranks, watched=watched) for watched in order}
            found.append((runs[False], runs[True]))
        return found


def _weight(pid: int) -> tuple[float, float] | None:
    """Resident memory of a process in MB, and the share of a core that it has used over its life."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        up = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:  # it has just left
        return None
    tick = os.sysconf("SC_CLK_TCK")
    age = up - int(stat[19]) / tick
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6, (int(stat[11]) + int(stat[12])) / tick / max(age, 0.1)


def _note(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def machine() -> Iterator[str]:
    """What it ran on."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    cores = len(os.sched_getaffinity(0))
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    yield f"hangwatch {version('hangwatch')}, torch {version('torch')}, Python {platform.python_version()}, Linux {platform.release()}"
    yield f"{model}, {cores} cores, {total:.0f} GB; load at the start {os.getloadavg()[0]:.1f}"


def _median(pairs: Sequence[tuple[Numbers, Numbers]], value: Callable[[Numbers, Numbers], float]) -> float:
    return statistics.median(value(bare, watched) for bare, watched in pairs)


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def _row(what: str, bare: str, watched: str, added: str, limit: str = "", *, ok: bool | None = None) -> str:
    judged = "" if ok is None else "ok" if ok else "OVER"
    return f"{what:<46} {bare:>11} {watched:>11} {added:>11} {limit:>12}  {judged}".rstrip()


def call_row(name: str, pairs: Sequence[tuple[Numbers, Numbers]], *, limited: bool) -> str:
    bare = _median(pairs, lambda b, _: b["call_ns"] / 1e3)
    watched = _median(pairs, lambda _, w: w["call_ns"] / 1e3)
    added = _median(pairs, lambda b, w: (w["call_ns"] - b["call_ns"]) / 1e3)
    told = (f"{bare:.1f} µs", f"{watched:.1f} µs", f"{added:+.1f} µs")
    return _row(name, *told, f"<= {MAX_CALL_US:g} µs", ok=added <= MAX_CALL_US) if limited else _row(name, *told)


def step_rows(pairs: Sequence[tuple[Numbers, Numbers]]) -> Iterator[str]:
    for name, key, limited in (("DDP step, CPU time of the ranks", "cpu_s", True), ("DDP step, wall time", "wall_s", False)):
        bare = _median(pairs, lambda b, _, key=key: 1e3 * b[key])  # type: ignore[misc]
        watched = _median(pairs, lambda _, w, key=key: 1e3 * w[key])  # type: ignore[misc]
        ratio = _median(pairs, lambda b, w, key=key: w[key] / b[key])  # type: ignore[misc]
        told = (f"{bare:.2f} ms", f"{watched:.2f} ms", _percent(ratio))
        if limited:
            yield _row(name, *told, f"<= {MAX_STEP_PERCENT:g} %", ok=100 * (ratio - 1) <= MAX_STEP_PERCENT)
        else:
            yield _row(name, *told)
        alone = [b[key] for b, _ in pairs]
        middle = statistics.median(alone)
        spread = f"{_percent(min(alone) / middle)} to {_percent(max(alone) / middle)}"
        yield f"  the bare script against itself: {spread}, {len(alone)} runs"


def memory_rows(pairs: Sequence[tuple[Numbers, Numbers]], bench: Bench) -> Iterator[str]:
    bare = _median(pairs, lambda b, _: b["resident_mb"])
    watched = _median(pairs, lambda _, w: w["resident_mb"])
    told = (f"{bare:.1f} MB", f"{watched:.1f} MB", f"{watched - bare:+.1f} MB")
    yield _row("memory of a training process", *told, f"<= {MAX_RANK_MB:g} MB", ok=watched - bare <= MAX_RANK_MB)
    agent = max(bench.agent_mb, default=0.0)
    known = f"{agent:.1f} MB" if agent else "not seen"
    yield _row("memory of the node agent, one a host", "", known, "", f"<= {MAX_AGENT_MB:g} MB", ok=0 < agent <= MAX_AGENT_MB)
    share = statistics.median(bench.agent_cores) if bench.agent_cores else 0.0
    yield _row("CPU of the node agent, its start included", "", f"{100 * share:.1f} %", "", "of one core")


def tracing_rows(bench: Bench, plan: Plan) -> Iterator[str]:
    """The same training, watched by what people reach for first: its CPU time beside that of as many bare steps."""
    for under, name in (("wrappers", "wrappers: shape, dtype, mean"), ("trace", "trace.Trace")):
        found = []
        for turn in range(plan.traced_pairs):
            _note(f"training under {name}: pair {turn + 1} of {plan.traced_pairs}")
            bare = bench.run("steps", plan.traced_steps, ranks=RANKS, watched=False)
            found.append((bare, bench.run("steps", plan.traced_steps, ranks=RANKS, watched=False, under=under)))
        bare_ms, under_ms = (statistics.median(1e3 * pair[i]["cpu_s"] for pair in found) for i in (0, 1))
        added = _percent(_median(found, lambda b, u: u["cpu_s"] / b["cpu_s"]))
        yield _row(f"DDP step under {name}", f"{bare_ms:.2f} ms", f"{under_ms:.2f} ms", added)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.overhead", description="What watching a training costs.")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs: numbers that say less")
    plan = QUICK if parser.parse_args(argv).quick else Plan()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # or the server would stay
    print(*machine(), "", sep="\n")
    print(_row("", "bare", "watched", "added", "limit"), flush=True)
    with tempfile.TemporaryDirectory(prefix="hangwatch-overhead-") as folder, serving(Path(folder, "server"), stall_after=60) as server:
        bench = Bench(Path(folder), server)
        pairs = bench.pairs("calls", plan.calls, ranks=1, times=plan.call_pairs)
        print(call_row("all_reduce, a backend that does nothing", pairs, limited=True), flush=True)
        pairs = bench.pairs("gloo calls", plan.calls // 5, ranks=1, times=plan.call_pairs)
        print(call_row("all_reduce on gloo, every 0.2 ms", pairs, limited=False), flush=True)
        pairs = bench.pairs("steps", plan.steps, ranks=RANKS, times=plan.pairs)
        for row in (*step_rows(pairs), *memory_rows(pairs, bench)):
            print(row, flush=True)
        for row in tracing_rows(bench, plan):
            print(row, flush=True)
        _note("")
    print("\nMedians over pairs of fresh runs, bare and watched in turn, of the median call or step of each run.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
