"""Jobs that take turns at the same work, so that whatever the machine does meanwhile happens to all
of them alike.

On a shared machine a script run twice differs from itself by more than what is to be shown. So a
bare job, a second bare one, which shows what still differs by chance, and those beside which they
are to be seen run at the same time, and each goes on for some milliseconds while the others sleep.
What is compared is always two neighbours in time; a set of fresh processes gives the median of that
over its turns, and several sets give the median of those, for where a process' memory happens to
lie makes a difference, too.
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
from tests.harness.job import Job, running
from tests.harness.processes import agents
from tests.harness.server import Server

WORKLOAD = Path(__file__).with_name("workload.py")
START_S, TURN_S = 120.0, 120.0  # the longest that a job may take to be there, and for one turn

Numbers = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a script is run."""

    name: str
    env: Mapping[str, str] = field(default_factory=dict)
    watched: bool = False


BARE, AGAIN = Way(name="bare"), Way(name="bare once more")
NATIVE = Way(name="hangwatch, native recorder", env={"HANGWATCH_RECORDER": "native"}, watched=True)
PYTHON = Way(name="hangwatch, Python recorder", env={"HANGWATCH_RECORDER": "python"}, watched=True)
# torch 2.13 has its own recorder on where nothing is said.
FLIGHT_OFF, FLIGHT_ON = {"TORCH_FR_BUFFER_SIZE": "0"}, {"TORCH_FR_BUFFER_SIZE": "2000"}
FLIGHT = Way(name="Flight Recorder", env=FLIGHT_ON)
BOTH = Way(name="both: native and Flight Recorder", env={**NATIVE.env, **FLIGHT_ON}, watched=True)
WRAPPERS = Way(name="wrappers that print shape, dtype, mean", env={"BENCHMARK_UNDER": "wrappers"})
TRACE = Way(name="trace.Trace", env={"BENCHMARK_UNDER": "trace"})


def without_flight_recorder(*ways: Way) -> tuple[Way, ...]:
    """The same ways, with nothing of PyTorch's own in them."""
    return tuple(replace(way, env={**way.env, **FLIGHT_OFF}) for way in ways)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What is run: ``what`` of the workload, ``count`` times a turn; ``key`` is the number looked
    at, ``unit`` of them are shown as one.
    """

    title: str
    what: str
    count: int
    ranks: int
    key: str
    unit: float
    ways: tuple[Way, ...]


@dataclass(slots=True, kw_only=True)
class Told:
    """What one job told, as means over its ranks: of each turn, and at its end."""

    turns: list[Numbers]
    last: Numbers
    agent_mb: float = 0.0
    agent_core: float = 0.0  # the share of a core that its node agent has used over its life


Fresh = dict[str, Told]  # by way, of one set of fresh processes


@dataclass(slots=True)
class Bench:
    """Runs sets of jobs in ``folder``; the watched ones are told to ``server``."""

    folder: Path
    server: Server
    _sets: int = 0

    def __post_init__(self) -> None:
        native.build(self.folder / "recorder")

    def sets(self, script: Script, sets: int, turns: int) -> list[Fresh]:
        """Raises RuntimeError where a bare or a watched job failed; another way that does not bear
        the script is left out.
        """
        return [self._run(script, turns, f"{script.title}: {n + 1} of {sets}") for n in range(sets)]

    def _run(self, script: Script, turns: int, title: str) -> Fresh:
        self._sets += 1
        with ExitStack() as stack:
            there: dict[str, _Party] = {}
            for way in script.ways:
                note(f"{title}, starting {way.name}")
                party = self._start(stack, script, way)
                if party.joined():
                    there[way.name] = party
                else:
                    party.fail(way)
            shuffled = random.Random(self._sets)
            for turn in range(turns):
                note(f"{title}, turn {turn + 1} of {turns}")
                for way in shuffled.sample(script.ways, len(script.ways)):
                    if way.name in there and not there[way.name].turn():
                        there.pop(way.name).fail(way)
            told = {name: party.leave() for name, party in there.items()}
        for way in script.ways:
            if way.watched and bool(told[way.name].last["native"]) != (
                way.env["HANGWATCH_RECORDER"] == "native"
            ):
                raise RuntimeError(f"{way.name} did not record")
        note("")
        return told

    def _start(self, stack: ExitStack, script: Script, way: Way) -> _Party:
        number = script.ways.index(way)
        folder = self.folder / f"set{self._sets}-{number}"
        folder.mkdir()
        meeting = socket.socket(socket.AF_UNIX)
        stack.callback(meeting.close)
        meeting.bind(str(folder / "turns"))
        meeting.listen(script.ranks)
        env = {
            "BENCHMARK_TURNS": str(folder / "turns"),
            "HANGWATCH_CACHE_DIR": str(self.folder / "recorder"),
            **way.env,
        }
        url = self.server.url if way.watched else None
        args = [script.what, str(script.count)]
        job = stack.enter_context(
            running(WORKLOAD, script.ranks, folder, url, name=folder.name, env=env, args=args)
        )
        party = _Party(job, meeting, script.ranks)
        stack.callback(party.close)
        return party


class _Party:
    """One job, whose ranks wait for their turn."""

    def __init__(self, job: Job, meeting: socket.socket, ranks: int) -> None:
        self._job, self._meeting, self._ranks = job, meeting, ranks
        self._lines: list[socket.SocketIO] = []
        self._turns: list[Numbers] = []

    def joined(self) -> bool:
        """All its ranks are there and warm."""
        self._meeting.settimeout(0.5)
        deadline = time.monotonic() + START_S
        while len(self._lines) < self._ranks:
            try:
                line, _ = self._meeting.accept()
            except TimeoutError:
                if self._job.process.poll() is not None or time.monotonic() > deadline:
                    return False
            else:
                line.settimeout(TURN_S)
                self._lines.append(line.makefile("rwb", buffering=0))
        return bool(self._told())

    def turn(self) -> bool:
        """Lets it go on for a turn; False where it did not come through."""
        try:
            for line in self._lines:
                line.write(b"go\n")
            told = self._told()
        except OSError:
            return False
        self._turns.append(told)
        return bool(told)

    def leave(self) -> Told:
        weights = [
            weight for pid in agents(self._job.run_dir) if (weight := _weight(pid)) is not None
        ]
        for line in self._lines:
            line.write(b"end\n")
        last = self._told()
        self._job.process.wait(60.0)
        (self._job.folder / "stdout").unlink()  # a traced run writes many megabytes
        mb, core = weights[0] if weights else (0.0, 0.0)
        return Told(turns=self._turns, last=last, agent_mb=mb, agent_core=core)

    def fail(self, way: Way) -> None:
        if way.watched or way.name in (BARE.name, AGAIN.name):
            raise RuntimeError(f"{way.name} failed: {self._job.stderr[-2000:]}")

    def close(self) -> None:
        for line in self._lines:
            line.close()

    def _told(self) -> Numbers:
        """The means over its ranks of what each of them says next; nothing where one is gone."""
        found = [json.loads(raw) for line in self._lines if (raw := line.readline())]
        if len(found) < self._ranks:
            return {}
        return {name: statistics.mean(numbers[name] for numbers in found) for name in found[0]}


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
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6, (int(stat[11]) + int(stat[12])) / tick / max(
        age, 0.1
    )


def add_only(parser: argparse.ArgumentParser, scripts: Sequence[Script]) -> None:
    """An option that chooses some of ``scripts``; see `wanted`."""
    parser.add_argument(
        "--only",
        action="append",
        metavar="WHAT",
        choices=[s.what for s in scripts],
        help="a script; repeatable",
    )


def wanted(told: argparse.Namespace, scripts: Sequence[Script]) -> list[Script]:
    return [script for script in scripts if not told.only or script.what in told.only]


def compared(sets: Sequence[Fresh], way: Way, key: str) -> tuple[list[float], list[float]]:
    """What a way adds to the bare script, and in which ratio it is to it: a median over the turns,
    of each set that has it.
    """
    pairs = [
        list(zip(fresh[way.name].turns, fresh[BARE.name].turns, strict=True))
        for fresh in sets
        if way.name in fresh
    ]
    added = [statistics.median(mine[key] - bare[key] for mine, bare in turns) for turns in pairs]
    ratios = [statistics.median(mine[key] / bare[key] for mine, bare in turns) for turns in pairs]
    return added, ratios


def middle(sets: Sequence[Fresh], way: Way, key: str) -> float:
    """A way's own median."""
    return statistics.median(
        statistics.median(turn[key] for turn in fresh[way.name].turns)
        for fresh in sets
        if way.name in fresh
    )


def percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.2f} %"


def spread(ratios: Sequence[float]) -> str:
    return f"{percent(min(ratios))} to {percent(max(ratios))}"


def note(text: str) -> None:
    """Progress, where somebody looks."""
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
