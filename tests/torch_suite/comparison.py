"""Runs torch's own DistributedTest plain and watched, and compares the two test by test."""

from __future__ import annotations

import json
import queue
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.harness.processes import clean_environment, clean_up_job
from tests.harness.server import Server, run_server

WORKER = Path(__file__).with_name("worker.py")
DEFAULT_WORLD_SIZE = "4"  # some tests need 4 ranks, others more than 7
RERUNS = 3  # of a test whose two outcomes differ, before this counts as a difference
# A hang of a test that ends within torch's own limits must not last for its default of 300 s.
TEST_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class TestRun:
    """One run of one test. `exit_codes` are those of its ranks; `output` is what all of its processes
    wrote.
    """

    __test__ = False

    name: str
    job: str
    outcome: str
    detail: str
    exit_codes: tuple[int | None, ...]
    seconds: float
    output: str

    @property
    def essence(self) -> tuple[object, ...]:
        """What must be equal with and without hangwatch."""
        last_line = self.detail.strip().rpartition("\n")[2]
        return self.outcome, re.sub(r"0x[0-9a-f]+|\d+", "N", last_line), self.exit_codes

    @property
    def own_messages(self) -> list[str]:
        """What hangwatch itself wrote into the test's output."""
        return [line for line in self.output.splitlines() if "hangwatch" in line]

    def __str__(self) -> str:
        return f"{self.outcome}, exit codes {list(self.exit_codes)}"


@dataclass(slots=True)
class Comparison:
    """`problems` has one entry for each difference, message of ours or false alert; `unstable` names
    tests that came out differently at first, and equal when they were repeated.
    """

    plain: dict[str, TestRun] = field(default_factory=dict)
    watched: dict[str, TestRun] = field(default_factory=dict)
    watched_by_job: dict[str, TestRun] = field(default_factory=dict)  # repeated ones as well
    problems: list[str] = field(default_factory=list)
    unstable: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # of tests that passed
    other_verdicts: Counter[str] = field(default_factory=Counter)  # by outcome and kind

    def count_outcomes(self, outcome: str) -> int:
        return sum(run.outcome == outcome for run in self.watched.values())


class RankObserver:
    """Counts the ranks that the server knows of each test, while they run: it drops jobs that have
    ended.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._ranks_by_job: dict[str, set[int]] = {}
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._observe, daemon=True)

    def __enter__(self) -> RankObserver:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop_event.set()
        self._thread.join()

    def count_ranks(self, job: str) -> int:
        return len(self._ranks_by_job.get(job, ()))

    def _observe(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stop_event.wait(1.0)
            for rank in self._server.get_items("ranks"):
                if rank["state"] != "missing":
                    self._ranks_by_job.setdefault(rank["job"], set()).add(rank["rank"])


def list_tests() -> list[str]:
    done = subprocess.run(
        [sys.executable, str(WORKER), "--list"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.split()


def compare_tests(
    names: Sequence[str],
    folder: Path,
    recorder_env: Mapping[str, str],
    *,
    common_env: Mapping[str, str] | None = None,
    job_count: int = 1,
    server_flags: Sequence[str] = (),
    report: Callable[[str, TestRun], None] = lambda side, run: None,
) -> Comparison:
    """Runs the tests without hangwatch, then watched by a server of their own, each as a job of its
    own. `common_env` is for both sides. `report` is called after each test with "plain" or "watched".
    """
    comparison, run_dir = Comparison(), folder / "run"
    run_dir.mkdir(parents=True)
    with run_server(folder / "server", *server_flags) as server:
        plain_env = {"WORLD_SIZE": DEFAULT_WORLD_SIZE, **(common_env or {})}
        watched_env = {
            **plain_env,
            **recorder_env,
            "HANGWATCH_URL": server.url,
            "HANGWATCH_RUN_DIR": str(run_dir),
        }
        sides = (
            ("plain", plain_env, comparison.plain),
            ("watched", watched_env, comparison.watched),
        )

        def run_both(chosen: Sequence[str], title: str) -> None:
            for side, env, runs in sides:
                env = {**env, "JOB_SUFFIX": title}
                for run in run_tests(chosen, folder / f"{side}{title}", env, job_count):
                    runs[run.name] = run
                    if side == "watched":
                        comparison.watched_by_job[run.job] = run
                    report(side, run)

        with RankObserver(server) as observer:
            try:
                run_both(names, "")
                for number in range(RERUNS):
                    differing = find_differing(comparison)
                    if not differing:
                        break
                    comparison.unstable = sorted({*comparison.unstable, *differing})
                    run_both(differing, f"-again{number + 1}")
            finally:
                remains = clean_up_job(run_dir)
        comparison.problems += remains
        check_coverage(comparison, observer)
        check_incidents(comparison, server)
    differing = find_differing(comparison)
    comparison.unstable = [name for name in comparison.unstable if name not in differing]
    for name in differing:
        comparison.problems.append(
            f"{name}: plain {comparison.plain[name]}; watched {comparison.watched[name]}\n"
            f"{comparison.watched[name].detail}"
        )
    for name, run in comparison.watched.items():
        comparison.problems += [f"{name} wrote: {line}" for line in run.own_messages]
    return comparison


def find_differing(comparison: Comparison) -> list[str]:
    return [
        name
        for name, run in comparison.plain.items()
        if run.essence != comparison.watched[name].essence
    ]


def check_coverage(comparison: Comparison, observer: RankObserver) -> None:
    """Adds the passed tests that were not watched to the problems."""
    for name, run in comparison.watched.items():
        count = observer.count_ranks(run.job)
        if run.outcome == "passed" and count != len(run.exit_codes):
            comparison.problems.append(
                f"{name}: the server knew {count} of its {len(run.exit_codes)} ranks"
            )


def check_incidents(comparison: Comparison, server: Server) -> None:
    """Adds the alerts of tests that passed to the problems. A rank of a skipped test exits with a
    status of its own, which is a true alert.
    """
    for incident in server.get_items("incidents"):
        run = comparison.watched_by_job[incident["job"]]
        if run.outcome != "passed":
            comparison.other_verdicts[f"{incident['kind']} on a {run.outcome} test"] += 1
            continue
        is_alert = incident["severity"] == "alert"
        (comparison.problems if is_alert else comparison.warnings).append(
            f"{run.name} passed, and got {incident['severity']} {incident['kind']}:"
            f" {incident['summary']}"
        )


def run_tests(
    names: Sequence[str], folder: Path, env: Mapping[str, str], job_count: int
) -> Iterator[TestRun]:
    """Yields each run when it has ended. The tests are dealt out to `job_count` workers."""
    runs: queue.SimpleQueue[TestRun | None] = queue.SimpleQueue()

    def run_share(number: int) -> None:
        try:
            for run in _run_worker(names[number::job_count], folder / str(number), env):
                runs.put(run)
        finally:
            runs.put(None)

    with ThreadPoolExecutor(job_count) as pool:
        shares = [pool.submit(run_share, number) for number in range(job_count)]
        running = len(shares)
        while running:
            run = runs.get()
            if run is None:
                running -= 1
            else:
                yield run
        for share in shares:
            share.result()


def _run_worker(names: Sequence[str], folder: Path, env: Mapping[str, str]) -> Iterator[TestRun]:
    """Raises AssertionError if the worker itself fails."""
    folder.mkdir(parents=True)
    variables = {"DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(TEST_TIMEOUT_S), **env}
    with (
        (folder / "stderr").open("wb") as stderr,
        subprocess.Popen(
            [sys.executable, str(WORKER), str(folder), *names],
            env=clean_environment(**variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield _parse_run(json.loads(line), folder)
            status = process.wait()
        finally:
            process.kill()
    assert status == 0, (folder / "stderr").read_text()


def _parse_run(document: dict[str, Any], folder: Path) -> TestRun:
    output = (folder / f"{document['name']}.txt").read_text(errors="replace")
    return TestRun(**{**document, "exit_codes": tuple(document["exit_codes"])}, output=output)


def format_summary(comparison: Comparison) -> Iterator[str]:
    """The differences by test, and the counts."""
    for title, lines in _list_sections(comparison):
        yield f"\n{title}:" if lines else f"{title}: none"
        yield from (f"  {line}" for line in lines)
    counts = {name: comparison.count_outcomes(name) for name in ("passed", "skipped", "failed")}
    seconds = {
        side: sum(run.seconds for run in runs.values())
        for side, runs in (("plain", comparison.plain), ("watched", comparison.watched))
    }
    yield (
        f"{len(comparison.watched)} tests, watched: {counts['passed']} passed, {counts['failed']}"
        f" failed, {counts['skipped']} skipped by torch; plain {seconds['plain']:.0f} s, watched"
        f" {seconds['watched']:.0f} s; {len(comparison.problems)} problems"
    )


def _list_sections(comparison: Comparison) -> Iterable[tuple[str, Sequence[str]]]:
    slower = [
        f"{name}: plain {comparison.plain[name].seconds:.1f} s, watched {run.seconds:.1f} s"
        for name, run in comparison.watched.items()
        if run.seconds > 2 * comparison.plain[name].seconds + 2
    ]
    others = [f"{count} x {verdict}" for verdict, count in comparison.other_verdicts.items()]
    yield "verdicts on tests that did not pass", others
    yield "warnings", comparison.warnings
    yield "differed at first, equal when repeated", comparison.unstable
    yield "slower than twice plain (not compared: the machine may have been busy)", slower
    yield "problems", comparison.problems
