"""Many hangs in a row: ``python -m tests.benchmarks.soak [--minutes 30]``.

A real server hears, over HTTP, 64 hosts that exist in this process only, and the node agent of a
real job beside them. Each job hangs, is let go once an alert is open with its culprit's stack, and
hangs anew some seconds after that is resolved; after some incidents a job ends and another one
begins. Every planted hang must be in the store once, with its culprit, and resolved; and the alert
channel told of it once when it opened and once when it was over.

Memory counts in the second half of the run: by then the server has filled what it keeps (1000
incidents, 4096 events, 20 ended jobs). It is flat where the median of the last quarter is at most
`SLACK_MB` above that of the quarter before: buffers come and go.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sqlite3
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx

from tests.harness import job, simulated
from tests.harness.processes import agents, eventually
from tests.harness.receiver import Hook, receiving
from tests.integration.test_server_http import Server, serving

from .dashboard import cpu_s

PROGRAM = Path(__file__).with_name("soaked.py")
JOBS, HOSTS, RANKS = 32, 2, 8  # jobs at a time; hosts of each, and ranks of a host
EVERY_S = 2.0  # between two heartbeats of a host
STALL_AFTER_S = 8
REST_S = 3.0  # from the end of an incident to the next hang of its job
PER_JOB = 5  # incidents
PATIENCE_S = 120.0  # for an incident to open, and to resolve
SAMPLE_S = 5.0
SLACK_MB = 1.0

Planted = tuple[str, int]  # a job and its late rank


class Hangs(Protocol):
    name: str

    def hang(self, *ranks: int) -> None: ...
    def go_on(self) -> None: ...


@dataclass(slots=True)
class Real:
    """Two ranks under torchrun, of which rank 1 stays away while the file ``held`` is there."""

    held: Path
    name: str = "real"

    def hang(self, *ranks: int) -> None:
        self.held.touch()

    def go_on(self) -> None:
        self.held.unlink(missing_ok=True)


@dataclass(slots=True)
class Line:
    """A job that hangs again and again."""

    job: Hangs
    late: Callable[[], int] = lambda: 1
    since: float = field(default_factory=time.monotonic)  # of its state
    state: str = "trains"  # or "hangs", or "goes on"
    planted: list[Planted] = field(default_factory=list)
    overdue: list[str] = field(default_factory=list)

    def look(self, shown: set[str], *, plant: bool) -> None:
        """Does what is due, given the names of the jobs with an open alert that has its culprit's
        stack.
        """
        now, open_ = time.monotonic(), self.job.name in shown
        if self.state == "trains":
            if plant and now - self.since > REST_S:
                self.planted.append((self.job.name, self.late()))
                self.job.hang(self.planted[-1][1])
                self.state, self.since = "hangs", now
            return
        seen = open_ is (self.state == "hangs")
        if seen or now - self.since > PATIENCE_S:
            if not seen:
                self.overdue.append(f"{self.job.name} {self.state}, and no incident tells so")
            self.job.go_on()
            self.state, self.since = "goes on" if self.state == "hangs" else "trains", now


@dataclass(slots=True)
class Lines:
    """All jobs: those of the simulated hosts, and the real one."""

    url: str
    real: Line
    hosted: list[simulated.Job] = field(init=False)  # each on hosts of its own
    lines: list[Line] = field(init=False)
    begun: int = 0

    def __post_init__(self) -> None:
        self.hosted = [self._begin() for _ in range(JOBS)]
        self.lines = [Line(made, self._late) for made in self.hosted]

    def _begin(self) -> simulated.Job:
        self.begun += 1
        ranks, name = HOSTS * RANKS, f"job{self.begun}"
        return simulated.Job(
            url=self.url,
            ranks=ranks,
            per_host=RANKS,
            groups=simulated.whole(ranks),
            name=name,
            host=f"{name}-{{}}",
        )

    def _late(self) -> int:
        return random.randrange(HOSTS * RANKS)

    @property
    def all(self) -> list[Line]:
        return [self.real, *self.lines]

    @property
    def planted(self) -> list[Planted]:
        return [one for line in self.all for one in line.planted]

    def beat(self) -> None:
        """One heartbeat of each host, evenly over `EVERY_S`."""
        due = time.monotonic()
        for made in self.hosted:
            for host in made.hosts:
                made.beat(host)
                due += EVERY_S / (JOBS * HOSTS)
                time.sleep(max(0.0, due - time.monotonic()))

    def look(self, shown: set[str], *, plant: bool) -> None:
        for line in self.all:
            line.look(shown, plant=plant)
        for place, (made, line) in enumerate(zip(self.hosted, self.lines, strict=True)):
            if (
                line.state == "trains"
                and sum(name == made.name for name, _ in line.planted) >= PER_JOB
            ):
                made.end()
                line.job = self.hosted[place] = self._begin()


@dataclass(slots=True)
class Usage:
    """What a process takes: resident memory over the time of the run, and CPU time."""

    name: str
    pid: int
    began: float = field(default_factory=time.monotonic)
    before_s: float = 0.0
    mb: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.before_s = cpu_s(self.pid)

    def sample(self) -> None:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        self.mb.append(pages * os.sysconf("SC_PAGE_SIZE") / 1e6)

    def flat(self) -> bool:
        """Prints its figures."""
        quarter = max(1, len(self.mb) // 4)
        medians = [statistics.median(self.mb[n * quarter :][:quarter] or self.mb) for n in range(4)]
        good = medians[3] <= medians[2] + SLACK_MB
        took_s = time.monotonic() - self.began
        told = " ".join(f"{median:7.2f}" for median in medians)
        share = 100 * (cpu_s(self.pid) - self.before_s) / took_s
        print(
            f"{self.name:12} {told} MB (max {max(self.mb):.2f}), {share:4.1f} % of a core: {'flat' if good else 'GROWS'}",
            flush=True,
        )
        return good


def shown(client: httpx.Client) -> set[str]:
    """The jobs with an open alert that has its culprit's stack."""
    found: set[str] = set()
    page = client.get("/api/v1/incidents", params={"status": "open"}).raise_for_status().json()
    while True:
        for incident in page["items"]:
            looked_at = {
                rank for entry in incident["stacks"] if entry["frames"] for rank in entry["ranks"]
            }
            if incident["severity"] == "alert" and looked_at.issuperset(incident["culprits"]):
                found.add(incident["job"])
        if not page["next"]:
            return found
        page = client.get(page["next"]).raise_for_status().json()


def dropped(
    planted: Iterable[Planted], kept: Iterable[dict[str, Any]], messages: Iterable[tuple[str, str]]
) -> list[str]:
    """What of the planted hangs is not as it should be in the store and in the messages (incident,
    event).
    """
    kept = list(kept)
    wanted, found = (
        Counter(planted),
        Counter((i["job"], i["culprits"][0] if len(i["culprits"]) == 1 else -1) for i in kept),
    )
    wrong = [
        f"{count} x no incident names rank {rank} of {name}"
        for (name, rank), count in (wanted - found).items()
    ]
    wrong += [
        f"{count} x an incident names rank {rank} of {name}, which did not hang"
        for (name, rank), count in (found - wanted).items()
    ]
    wrong += [f"incident {i['id']} is {i['status']}" for i in kept if i["status"] != "resolved"]
    due = Counter((i["id"], event) for i in kept for event in ("opened", "resolved"))
    told = Counter(messages)
    named = {i["id"]: f"{i['severity']} {i['kind']} of {i['job']}" for i in kept}
    wrong += [f"{event} was not told of {name}, {named[name]}" for name, event in due - told]
    return wrong + [f"{event} was told too often of {name}" for name, event in told - due]


def stored(data: Path) -> list[dict[str, Any]]:
    with sqlite3.connect(data / "hangwatch.sqlite3") as db:
        return [json.loads(body) for (body,) in db.execute("SELECT body FROM incidents")]


def run(server: Server, lines: Lines, usages: list[Usage], minutes: float) -> None:
    began = sampled = said = time.monotonic()
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:
        while True:
            lines.beat()
            now = time.monotonic()
            over = now - began > 60 * minutes
            lines.look(shown(client), plant=not over)
            if now - sampled >= SAMPLE_S:
                sampled += SAMPLE_S
                client.get("/metrics").raise_for_status()  # as Prometheus does
                for usage in usages:
                    usage.sample()
            if now - said >= 60:
                said += 60
                told = ", ".join(f"{usage.name} {usage.mb[-1]:.2f} MB" for usage in usages)
                print(
                    f"minute {(now - began) / 60:.0f}: {len(lines.planted)} hangs of {lines.begun + 1} jobs; {told}",
                    flush=True,
                )
            if over and all(line.state == "trains" for line in lines.all):
                return


def soak(folder: Path, minutes: float) -> bool:
    with (
        receiving(Hook()) as hook,
        serving(folder, "--stall-after", str(STALL_AFTER_S), "--alert", hook.url) as server,
    ):
        goes_on, held = folder / "goes_on", folder / "held"
        goes_on.touch()
        with job.running(
            PROGRAM, 2, folder / "job", server.url, name="real", args=[str(goes_on), str(held)]
        ) as real:
            assert eventually(lambda: len(agents(real.run_dir)) == 1, 120), real.stderr
            lines = Lines(server.url, Line(Real(held)))
            [agent] = agents(real.run_dir)
            usages = [Usage("server", server.process.pid), Usage("node agent", agent)]
            run(server, lines, usages, minutes)
            count = len(lines.planted)
            print(
                f"\n{minutes:g} minutes, {JOBS * HOSTS} simulated hosts of {RANKS} ranks, {lines.begun + 1} jobs, {count} hangs"
            )
            print("medians of the resident memory in each quarter:")
            flat = [usage.flat() for usage in usages]
            goes_on.unlink()
            assert real.process.wait(60) == 0, real.stderr
        eventually(lambda: len(hook.got) >= 2 * count, 30)
        assert server.stop() == 0, server.err
    kept = stored(folder / "data")
    messages = [(told["id"], told["event"]) for told in (json.loads(body) for _, body in hook.got)]
    wrong = [text for line in lines.all for text in line.overdue] + dropped(
        lines.planted, kept, messages
    )
    print(f"{len(kept)} incidents in the store, {len(messages)} messages", *wrong[:50], sep="\n")
    print(f"{len(wrong)} dropped, doubled or left open")
    return all(flat) and not wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.soak", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument("--minutes", type=float, default=30)
    with tempfile.TemporaryDirectory(prefix="hangwatch-soak-") as folder:
        return 0 if soak(Path(folder), parser.parse_args().minutes) else 1


if __name__ == "__main__":
    sys.exit(main())
