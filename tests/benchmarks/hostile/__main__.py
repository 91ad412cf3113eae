"""Hostile clients, servers and files, while real jobs hang: ``python -m tests.benchmarks.hostile [--minutes
10]``.

Each attack makes random input of one class, over real sockets and against real processes: requests
without a token, with the token of a job and from another user of the machine, replies to a node
agent, and files for ``hangwatch analyze``. Every 30 seconds a job of somebody else hangs, and its
verdict must be right, and in time. The server must answer a health check throughout, and no process
may grow beyond its limit. The exit code is 1 if one of these fails.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from hangwatch.protocol.request_signing import derive_job_token
from tests.harness.processes import read_resident_mb
from tests.harness.server import Server, run_server

from .attacks import Attack, HostileError
from .clients import JOB, JobAttacker, hold_connections, make_head_attack
from .files import make_file_attack
from .replies import HostileServer, running_agent
from .victims import HangingJobs

HEALTH_TIMEOUT_S = 10.0
STALL_AFTER_S = 4.0
# Above what each uses at first. docs/limits.md has the limits that these follow from.
MAX_SERVER_GROWTH_MB, MAX_AGENT_GROWTH_MB = 1500.0, 64.0
SAMPLE_INTERVAL_S = 1.0


@dataclass(slots=True)
class Target:
    """A process under attack, and the memory that it used at first and at most."""

    name: str
    pid: int
    max_growth_mb: float
    first_mb: float = 0.0
    most_mb: float = 0.0

    def sample(self) -> None:
        """Raises HostileError if it ended or grew too much."""
        try:
            resident_mb = read_resident_mb(self.pid)
        except (OSError, IndexError):
            raise HostileError(f"the {self.name} ended") from None
        self.first_mb = self.first_mb or resident_mb
        self.most_mb = max(self.most_mb, resident_mb)
        if resident_mb - self.first_mb > self.max_growth_mb:
            raise HostileError(
                f"the {self.name} grew from {self.first_mb:.0f} to {resident_mb:.0f} MB"
            )


@dataclass(slots=True)
class Report:
    targets: list[Target]
    attacks: list[Attack]
    problems: list[str] = field(default_factory=list)
    victims: str = ""

    def print_table(self) -> None:
        print("| attack | times |\n|---|---|")
        for attack in self.attacks:
            print(f"| {attack.name} | {attack.count:,} |")
        print("\n| process | at first | at most | limit |\n|---|---|---|---|")
        for target in self.targets:
            limit_mb = target.first_mb + target.max_growth_mb
            print(
                f"| {target.name} | {target.first_mb:.0f} MB | {target.most_mb:.0f} MB |"
                f" {limit_mb:.0f} MB |"
            )
        print(f"\n{self.victims}")
        for problem in self.problems:
            print(f"\nPROBLEM: {problem}")


def run_attacks(folder: Path, minutes: float, seed: int) -> Report:
    ends_at = time.monotonic() + 60.0 * minutes
    hostile = HostileServer(seed)
    token = secrets.token_hex(16)
    flags = ("--token", token, "--stall-after", str(STALL_AFTER_S))
    with (
        run_server(folder / "server", *flags) as server,
        running_agent(folder, hostile.url) as agent,
    ):
        targets = [
            Target("server", server.pid, MAX_SERVER_GROWTH_MB),
            Target("node agent", agent.pid, MAX_AGENT_GROWTH_MB),
        ]

        def make_attacker() -> JobAttacker:
            return JobAttacker(server.url, derive_job_token(token, JOB))

        attacks = [
            *(Attack(f"heads {n}", make_head_attack(server.url)) for n in range(2)),
            Attack("costly heartbeats", make_attacker().send_costly),
            Attack("extreme values", make_attacker().send_extremes),
            Attack("unrequested stacks", make_attacker().send_samples),
            Attack("new agents and attempts", make_attacker().flood_agents),
            Attack("waits for commands", make_attacker().flood_waits),
            Attack("ranks of others", make_attacker().claim_ranks),
            Attack("replies", hostile.answer_once),
            Attack("files", make_file_attack(folder)),
        ]
        if os.geteuid() == 0:
            attacks.append(Attack("connections of another user", hold_connections(server.url)))
        report = Report(targets, attacks)
        victims = HangingJobs(server, folder, token)
        for attack in attacks:
            attack.start(seed, ends_at)
        victims.start(ends_at)
        try:
            _watch_targets(server, report, ends_at)
        except HostileError as error:
            report.problems.append(str(error))
        if victims.thread is not None:
            victims.thread.join()
        report.victims = victims.describe()
        report.problems += victims.list_problems()
        report.problems += [f"{attack.name}: {attack.error}" for attack in attacks if attack.error]
    return report


def _watch_targets(server: Server, report: Report, ends_at: float) -> None:
    shown_at = 0.0
    while time.monotonic() < ends_at and not any(attack.error for attack in report.attacks):
        for target in report.targets:
            target.sample()
        started_at = time.monotonic()
        try:
            httpx.get(f"{server.url}/healthz", timeout=HEALTH_TIMEOUT_S).raise_for_status()
        except httpx.HTTPError as error:
            raise HostileError(f"the server does not answer: {error!r}") from None
        if started_at - shown_at >= 30.0:
            shown_at = started_at
            sizes = ", ".join(f"{t.name} {t.most_mb:.0f} MB" for t in report.targets)
            print(f"{ends_at - started_at:4.0f} s left: {sizes}", file=sys.stderr, flush=True)
        time.sleep(SAMPLE_INTERVAL_S)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.hostile",
        description="Hostile clients, servers and files, while jobs of others hang.",
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="(10)")
    parser.add_argument("--seed", type=int, default=None, help="of the random input (drawn)")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.randrange(1 << 30)
    print(f"seed {seed}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="hangwatch-hostile-") as folder:
        report = run_attacks(Path(folder), arguments.minutes, seed)
    report.print_table()
    return 1 if report.problems else 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
