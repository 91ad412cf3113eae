"""What the dashboard costs with many ranks: ``python -m tests.benchmarks.dashboard [--ranks 16384]
[--viewers 20]``.

A real server is told of ranks that do not exist, by the node agents' own messages; a headless
Chromium and then many streams look at /ranks. What viewers cost the server is its CPU time with
them less that without: heartbeats and diagnosis go on in both. Processes, hosts and groups are as
in a job of tensor and data parallelism: 8 ranks a host and a group, 64 in the other groups.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
from selenium.webdriver.remote.webdriver import WebDriver

from tests.harness import simulated
from tests.harness.browser import browsing, until_shown
from tests.harness.processes import eventually
from tests.harness.server import Server, serving

MAX_LOAD_S, MAX_UPDATE_MS, MAX_CORE_PERCENT = 2.0, 50.0, 10.0
LOADS, SECONDS = 5, 20.0
EVERY_S = 2.5  # seconds between two heartbeats of a host, as a busy server asks for


def groups(rank: int) -> list[simulated.Group]:
    first, block = rank // 8 * 8, rank // 512 * 512
    member = block + rank % 8
    return [
        simulated.Group(name=f"tp{first}", desc="tp", ranks=f"{first}-{first + 7}"),
        simulated.Group(name=f"dp{member}", desc="dp", ranks=f"{member}-{member + 504}:8"),
    ]


def cpu_s(pid: int) -> float:
    """CPU time that a process has used, of all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cores(pid: int) -> float:
    """The share of one core that a process takes over `SECONDS`."""
    began, used = time.monotonic(), cpu_s(pid)
    time.sleep(SECONDS)
    return (cpu_s(pid) - used) / (time.monotonic() - began)


@contextmanager
def viewing(url: str, viewers: int) -> Iterator[list[int]]:
    """Streams of the page, as that many browsers hold them; yields the bytes that each has got."""
    got = [0] * viewers
    over = threading.Event()

    def view(n: int) -> None:
        with httpx.stream(
            "GET",
            f"{url}/ranks",
            headers={"Accept": "text/event-stream"},
            trust_env=False,
            timeout=30,
        ) as answer:
            for chunk in answer.iter_raw():
                got[n] += len(chunk)
                if over.is_set():
                    return

    threads = [threading.Thread(target=view, args=(n,)) for n in range(viewers)]
    for thread in threads:
        thread.start()
    try:
        yield got
    finally:
        over.set()
        for thread in threads:
            thread.join()


def load_s(browser: WebDriver, url: str) -> float:
    """Seconds from the request to a page that answers: drawn, and its scripts run."""
    browser.get("about:blank")
    browser.get(f"{url}/ranks")
    until_shown(browser, "#table tbody", "0")
    usable: float = browser.execute_script(
        "return performance.getEntriesByName('usable')[0].startTime"
    )
    return usable / 1000


def updates_ms(browser: WebDriver, made: simulated.Job) -> list[float]:
    """What each update cost the page, scripts and layout, while every rank but one comes to wait,
    and goes on.
    """
    browser.execute_script(
        "window.long = []; new PerformanceObserver((l) => window.long.push(...l.getEntries().map((e) => e.duration)))"
        ".observe({type: 'longtask'}); performance.clearMeasures();"
    )
    made.hang(made.ranks // 3)
    until_shown(browser, "#states", "waiting", 60)
    time.sleep(2 * EVERY_S)
    made.late = set()
    moves = "return !document.querySelector('#count-waiting')"
    assert eventually(lambda: browser.execute_script(moves), 60), "the ranks still wait"
    spent: list[list[float]] = browser.execute_script(
        "return performance.getEntriesByType('measure').filter((e) => e.name.startsWith('part')).map((e) => [e.startTime, e.duration])"
    )
    bursts: list[float] = []
    last = -1000.0
    for start, duration in sorted(spent):  # parts that come together are one update
        if start - last > 100:
            bursts.append(0.0)
        bursts[-1] += duration
        last = start
    long: list[float] = browser.execute_script("return window.long")
    return bursts + long


def verdict(name: str, value: float, unit: str, limit: float) -> bool:
    print(
        f"{name:58} {value:8.2f} {unit:6} (limit {limit:g}) {'ok' if value <= limit else 'OVER'}",
        flush=True,
    )
    return value <= limit


def measure(folder: Path, ranks: int, viewers: int) -> bool:
    with ExitStack() as stack:
        server: Server = stack.enter_context(serving(folder / "server", stall_after=60))
        made = simulated.Job(url=server.url, ranks=ranks, groups=groups)
        print(f"{ranks} ranks on {len(made.hosts)} hosts, {os.cpu_count()} cores", flush=True)
        stack.enter_context(made.beating(EVERY_S))
        wait_for_all(server, ranks)
        with browsing(folder / "profile") as browser:
            loads = sorted(load_s(browser, server.url) for _ in range(LOADS))
            good = verdict(
                f"/ranks is usable after (median of {LOADS})", loads[LOADS // 2], "s", MAX_LOAD_S
            )
            spent = updates_ms(browser, made)
            good &= verdict(
                f"the dearest of {len(spent)} updates costs the page",
                max(spent),
                "ms",
                MAX_UPDATE_MS,
            )
        alone = cores(server.pid)
        with viewing(server.url, viewers) as got:
            time.sleep(2.0)
            together = cores(server.pid)
        print(f"{'the server without viewers takes':58} {100 * alone:8.2f} % of a core")
        print(f"{f'each of {viewers} viewers got':58} {min(got) / 1024 / SECONDS:8.2f} KiB/s")
        good &= verdict(
            f"{viewers} viewers add to it", 100 * (together - alone), "%", MAX_CORE_PERCENT
        )
        return good


def wait_for_all(server: Server, ranks: int) -> None:
    """Raises TimeoutError where the server has not heard of all of them within five minutes."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        jobs = server.items("jobs")
        if jobs and jobs[0]["heard_of"] == ranks:
            return
        time.sleep(1.0)
    raise TimeoutError(f"not all {ranks} ranks are known: {server.log()}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.dashboard", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument("--ranks", type=int, default=16_384)
    parser.add_argument("--viewers", type=int, default=20)
    told = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hangwatch-dashboard-") as folder:
        return 0 if measure(Path(folder), told.ranks, told.viewers) else 1


if __name__ == "__main__":
    sys.exit(main())
