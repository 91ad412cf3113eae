"""Jobs that take turns at the same work, so that changes of the machine's speed affect all of them
equally.

On a shared machine, two runs of a script differ by more than what is to be shown. So a bare job, a
second bare one, which shows the difference that remains by chance, and the jobs to be compared run
at the same time, and each works for some milliseconds while the others sleep. Only turns that are
adjacent in time are compared; a set of fresh processes gives the median over its turns, and several
sets give the median of these, because the memory layout of a process makes a difference, too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

from tests.harness import native
from tests.harness.job import LaunchedJob, running_job
from tests.harness.processes import find_agents, read_resident_mb
from tests.harness.server import Server

WORKLOAD = Path(__file__).with_name("workload.py")
START_S, TURN_S = 120.0, 120.0  # the longest that a job may take to start, and for one turn

Numbers = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """How a script is run."""

    name: str
    env: Mapping[str, str] = field(default_factory=dict)
    watched: bool = False


BARE, BARE_AGAIN = Variant(name="bare"), Variant(name="bare, second run")
NATIVE = Variant(
    name="hangwatch, native recorder", env={"HANGWATCH_RECORDER": "native"}, watched=True
)
PYTHON = Variant(
    name="hangwatch, Python recorder", env={"HANGWATCH_RECORDER": "python"}, watched=True
)
# What no recorder in Python can be cheaper than.
EMPTY_KERNEL = Variant(
    name="a Python kernel that only passes on", env={"BENCHMARK_UNDER": "kernel"}
)
# torch 2.13 enables its own recorder by default.
FLIGHT_OFF, FLIGHT_ON = {"TORCH_FR_BUFFER_SIZE": "0"}, {"TORCH_FR_BUFFER_SIZE": "2000"}
FLIGHT = Variant(name="Flight Recorder", env=FLIGHT_ON)
BOTH = Variant(
    name="both: native and Flight Recorder", env={**NATIVE.env, **FLIGHT_ON}, watched=True
)
WRAPPERS = Variant(
    name="wrappers that print shape, dtype, mean", env={"BENCHMARK_UNDER": "wrappers"}
)
TRACE = Variant(name="trace.Trace", env={"BENCHMARK_UNDER": "trace"})


def without_flight_recorder(*ways: Variant) -> tuple[Variant, ...]:
    """The same variants with PyTorch's Flight Recorder switched off."""
    return tuple(replace(way, env={**way.env, **FLIGHT_OFF}) for way in ways)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The work to run: ``what`` of the workload, ``count`` times per turn. ``key`` names the number
    to report, which is divided by ``unit``.
    """

    title: str
    what: str
    count: int
    ranks: int
    key: str
    unit: float
    ways: tuple[Variant, ...]


@dataclass(slots=True, kw_only=True)
class JobFigures:
    """The numbers that one job reported, as means over its ranks: per turn, and at its end."""

    turns: list[Numbers]
    final_numbers: Numbers
    agent_mb: float = 0.0
    agent_core: float = 0.0  # the share of a core that its node agent has used over its life


VariantFigures = dict[str, JobFigures]  # by way, of one set of fresh processes


@dataclass(slots=True)
class TurnBench:
    """Runs sets of jobs in ``folder``; the watched ones report to ``server``."""

    folder: Path
    server: Server
    _sets_run: int = 0

    def __post_init__(self) -> None:
        native.build_recorder(self.folder / "recorder")

    def run_sets(self, script: Script, sets: int, turns: int) -> list[VariantFigures]:
        """Raises RuntimeError if a bare or a watched job failed; other variants that cannot run the
        script are omitted.
        """
        return [
            self._run_set(script, turns, f"{script.title}: {n + 1} of {sets}") for n in range(sets)
        ]

    def _run_set(self, script: Script, turns: int, title: str) -> VariantFigures:
        self._sets_run += 1
        with ExitStack() as stack:
            running_jobs: dict[str, _TurnJob] = {}
            for way in script.ways:
                show_progress(f"{title}, starting {way.name}")
                turn_job = self._start_job(stack, script, way)
                if turn_job.wait_until_ready():
                    running_jobs[way.name] = turn_job
                else:
                    turn_job.check_may_fail(way)
            shuffled = random.Random(self._sets_run)
            for turn in range(turns):
                show_progress(f"{title}, turn {turn + 1} of {turns}")
                for way in shuffled.sample(script.ways, len(script.ways)):
                    if way.name in running_jobs and not running_jobs[way.name].run_turn():
                        running_jobs.pop(way.name).check_may_fail(way)
            figures = {name: turn_job.finish_job() for name, turn_job in running_jobs.items()}
        for way in script.ways:
            if way.watched and bool(figures[way.name].final_numbers["native"]) != (
                way.env["HANGWATCH_RECORDER"] == "native"
            ):
                raise RuntimeError(f"{way.name} did not record")
        show_progress("")
        return figures

    def _start_job(self, stack: ExitStack, script: Script, variant: Variant) -> _TurnJob:
        number = script.ways.index(variant)
        folder = self.folder / f"set{self._sets_run}-{number}"
        folder.mkdir()
        listener = socket.socket(socket.AF_UNIX)
        stack.callback(listener.close)
        listener.bind(str(folder / "turns"))
        listener.listen(script.ranks)
        env = {
            "BENCHMARK_TURNS": str(folder / "turns"),
            "HANGWATCH_CACHE_DIR": str(self.folder / "recorder"),
            **variant.env,
        }
        url = self.server.url if variant.watched else None
        args = [script.what, str(script.count)]
        job = stack.enter_context(
            running_job(WORKLOAD, script.ranks, folder, url, name=folder.name, env=env, args=args)
        )
        turn_job = _TurnJob(job, listener, script.ranks)
        stack.callback(turn_job.close)
        return turn_job


class _TurnJob:
    """One job, whose ranks wait for their turn."""

    def __init__(self, job: LaunchedJob, listener: socket.socket, ranks: int) -> None:
        self._job, self._listener, self._ranks = job, listener, ranks
        self._connections: list[socket.SocketIO] = []
        self._turns: list[Numbers] = []

    def wait_until_ready(self) -> bool:
        """Waits until all ranks are connected and warmed up; returns whether they are."""
        self._listener.settimeout(0.5)
        deadline = time.monotonic() + START_S
        while len(self._connections) < self._ranks:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if self._job.process.poll() is not None or time.monotonic() > deadline:
                    return False
            else:
                connection.settimeout(TURN_S)
                self._connections.append(connection.makefile("rwb", buffering=0))
        return bool(self._read_numbers())

    def run_turn(self) -> bool:
        """Lets the job work for a turn; returns False if it failed."""
        try:
            for connection in self._connections:
                connection.write(b"go\n")
            numbers = self._read_numbers()
        except OSError:
            return False
        self._turns.append(numbers)
        return bool(numbers)

    def finish_job(self) -> JobFigures:
        usages = [
            usage
            for pid in find_agents(self._job.run_dir)
            if (usage := _read_process_usage(pid)) is not None
        ]
        for connection in self._connections:
            connection.write(b"end\n")
        final_numbers = self._read_numbers()
        self._job.process.wait(60.0)
        (self._job.folder / "stdout").unlink()  # a traced run writes many megabytes
        agent_mb, agent_core = usages[0] if usages else (0.0, 0.0)
        return JobFigures(
            turns=self._turns, final_numbers=final_numbers, agent_mb=agent_mb, agent_core=agent_core
        )

    def check_may_fail(self, variant: Variant) -> None:
        if variant.watched or variant.name in (BARE.name, BARE_AGAIN.name):
            raise RuntimeError(f"{variant.name} failed: {self._job.stderr[-2000:]}")

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    def _read_numbers(self) -> Numbers:
        """The means over the ranks of the next numbers that each sends; empty if a rank has exited."""
        rank_numbers = [
            json.loads(raw) for connection in self._connections if (raw := connection.readline())
        ]
        if len(rank_numbers) < self._ranks:
            return {}
        return {
            name: statistics.mean(numbers[name] for numbers in rank_numbers)
            for name in rank_numbers[0]
        }


def _read_process_usage(pid: int) -> tuple[float, float] | None:
    """Resident memory of a process in MB, and the share of a core that it has used over its life."""
    try:
        resident_mb = read_resident_mb(pid)
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:  # it has just exited
        return None
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    age_s = uptime_s - int(stat[19]) / ticks_per_s
    return resident_mb, (int(stat[11]) + int(stat[12])) / ticks_per_s / max(age_s, 0.1)


def add_only_option(parser: argparse.ArgumentParser, scripts: Sequence[Script]) -> None:
    """Adds an option that selects some of ``scripts``; see `select_scripts`."""
    parser.add_argument(
        "--only",
        action="append",
        metavar="WHAT",
        choices=[s.what for s in scripts],
        help="a script; repeatable",
    )


def select_scripts(arguments: argparse.Namespace, scripts: Sequence[Script]) -> list[Script]:
    return [script for script in scripts if not arguments.only or script.what in arguments.only]


def compare_to_bare(
    sets: Sequence[VariantFigures], way: Variant, key: str
) -> tuple[list[float], list[float]]:
    """What a variant adds to the bare script, and the ratio of the two: for each set that has the
    variant, the median over its turns.
    """
    pairs = [
        list(zip(fresh[way.name].turns, fresh[BARE.name].turns, strict=True))
        for fresh in sets
        if way.name in fresh
    ]
    added = [statistics.median(mine[key] - bare[key] for mine, bare in turns) for turns in pairs]
    ratios = [statistics.median(mine[key] / bare[key] for mine, bare in turns) for turns in pairs]
    return added, ratios


def median_of_sets(sets: Sequence[VariantFigures], way: Variant, key: str) -> float:
    """The median over sets of a variant's median over turns."""
    return statistics.median(
        statistics.median(turn[key] for turn in fresh[way.name].turns)
        for fresh in sets
        if way.name in fresh
    )


def format_percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.2f} %"


def format_spread(ratios: Sequence[float]) -> str:
    return f"{format_percent(min(ratios))} to {format_percent(max(ratios))}"


def show_progress(text: str) -> None:
    """Shows progress if stderr is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def describe_machine() -> Iterator[str]:
    """The versions and the hardware that the numbers were measured on."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    cores = len(os.sched_getaffinity(0))
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    yield (
        f"hangwatch {version('hangwatch')}, torch {version('torch')}, Python"
        f" {platform.python_version()}, Linux {platform.release()}"
    )
    yield f"{model}, {cores} cores, {total:.0f} GB; load at the start {os.getloadavg()[0]:.1f}"
