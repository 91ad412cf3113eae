"""What the dashboard costs with many ranks: ``python -m tests.benchmarks.dashboard [--ranks 16384]
[--viewers 20]``.

A real server receives heartbeats of simulated ranks; a headless Chromium and then many streams read
/ranks. The cost of viewers is the server's CPU time with them minus that without: heartbeats and
diagnosis continue in both. Processes, hosts and groups are as in a job of tensor and data
parallelism: 8 ranks a host and a group, 64 in the other groups.
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

from tests.harness.browser import open_browser, wait_until_shown
from tests.harness.server import Server, running_server
from tests.simulation.job_reporter import JobReporter
from tests.simulation.simulated_job import SimulatedGroup, SimulatedJob
from tests.simulation.waiting import wait_until

from .process_cost import read_cpu_s

MAX_LOAD_S, MAX_UPDATE_MS, MAX_CORE_PERCENT = 2.0, 50.0, 10.0
PAGE_LOADS, MEASURE_S = 5, 20.0
HEARTBEAT_INTERVAL_S = 2.5  # of a host, as a busy server requests it


def list_groups(rank: int) -> list[SimulatedGroup]:
    first, block = rank // 8 * 8, rank // 512 * 512
    member = block + rank % 8
    return [
        SimulatedGroup(name=f"tp{first}", desc="tp", ranks=f"{first}-{first + 7}"),
        SimulatedGroup(name=f"dp{member}", desc="dp", ranks=f"{member}-{member + 504}:8"),
    ]


def measure_core_share(pid: int) -> float:
    """The share of one core that a process uses over `MEASURE_S`."""
    began_at, cpu_before_s = time.monotonic(), read_cpu_s(pid)
    time.sleep(MEASURE_S)
    return (read_cpu_s(pid) - cpu_before_s) / (time.monotonic() - began_at)


@contextmanager
def open_viewers(url: str, viewers: int) -> Iterator[list[int]]:
    """Opens the page's stream for each viewer; yields the bytes that each has received."""
    received_bytes = [0] * viewers
    over = threading.Event()

    def read_stream(n: int) -> None:
        with httpx.stream(
            "GET",
            f"{url}/ranks",
            headers={"Accept": "text/event-stream"},
            trust_env=False,
            timeout=30,
        ) as answer:
            for chunk in answer.iter_raw():
                received_bytes[n] += len(chunk)
                if over.is_set():
                    return

    threads = [threading.Thread(target=read_stream, args=(n,)) for n in range(viewers)]
    for thread in threads:
        thread.start()
    try:
        yield received_bytes
    finally:
        over.set()
        for thread in threads:
            thread.join()


def measure_load_s(browser: WebDriver, url: str) -> float:
    """Seconds from the request until the page is rendered and its scripts have run."""
    browser.get("about:blank")
    browser.get(f"{url}/ranks")
    wait_until_shown(browser, "#table tbody", "0")
    usable: float = browser.execute_script(
        "return performance.getEntriesByName('usable')[0].startTime"
    )
    return usable / 1000


def measure_updates_ms(browser: WebDriver, job: SimulatedJob) -> list[float]:
    """The time in scripts and layout of each update while all ranks but one begin to wait, and then
    continue.
    """
    browser.execute_script(
        "window.long = []; new PerformanceObserver((l) =>"
        " window.long.push(...l.getEntries().map((e) => e.duration))).observe({type: 'longtask'});"
        " performance.clearMeasures();"
    )
    job.hang_ranks(job.ranks // 3)
    wait_until_shown(browser, "#states", "waiting", 60)
    time.sleep(2 * HEARTBEAT_INTERVAL_S)
    job.resume_training()
    moves = "return !document.querySelector('#count-waiting')"
    assert wait_until(lambda: browser.execute_script(moves), 60), "the ranks still wait"
    spent: list[list[float]] = browser.execute_script(
        "return performance.getEntriesByType('measure').filter((e) =>"
        " e.name.startsWith('part')).map((e) => [e.startTime, e.duration])"
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


def check_limit(name: str, value: float, unit: str, limit: float) -> bool:
    print(
        f"{name:58} {value:8.2f} {unit:6} (limit {limit:g}) {'ok' if value <= limit else 'OVER'}",
        flush=True,
    )
    return value <= limit


def run_benchmark(folder: Path, ranks: int, viewers: int) -> bool:
    with ExitStack() as stack:
        server: Server = stack.enter_context(running_server(folder / "server", stall_after_s=60))
        made = SimulatedJob(ranks=ranks, groups=list_groups)
        print(f"{ranks} ranks on {len(made.hosts)} hosts, {os.cpu_count()} cores", flush=True)
        reporter = JobReporter.connect(server.url, made)
        stack.enter_context(reporter.reporting(HEARTBEAT_INTERVAL_S))
        wait_until_known(server, ranks)
        with open_browser(folder / "profile") as browser:
            loads = sorted(measure_load_s(browser, server.url) for _ in range(PAGE_LOADS))
            good = check_limit(
                f"/ranks is usable after (median of {PAGE_LOADS})",
                loads[PAGE_LOADS // 2],
                "s",
                MAX_LOAD_S,
            )
            spent = measure_updates_ms(browser, made)
            good &= check_limit(
                f"the slowest of {len(spent)} updates takes the page",
                max(spent),
                "ms",
                MAX_UPDATE_MS,
            )
        alone = measure_core_share(server.pid)
        with open_viewers(server.url, viewers) as received_bytes:
            time.sleep(2.0)
            together = measure_core_share(server.pid)
        print(f"{'the server without viewers takes':58} {100 * alone:8.2f} % of a core")
        print(
            f"{f'each of {viewers} viewers received':58} {min(received_bytes) / 1024 / MEASURE_S:8.2f} KiB/s"
        )
        good &= check_limit(
            f"{viewers} viewers add to it", 100 * (together - alone), "%", MAX_CORE_PERCENT
        )
        return good


def wait_until_known(server: Server, ranks: int) -> None:
    """Waits until the server knows all ranks. Raises TimeoutError after five minutes."""

    def are_all_known() -> bool:
        jobs = server.get_items("jobs")
        return bool(jobs) and jobs[0]["reported_ranks"] == ranks

    if not wait_until(are_all_known, 300.0, 1.0):
        raise TimeoutError(f"not all {ranks} ranks are known: {server.read_log()}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.dashboard", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument("--ranks", type=int, default=16_384, help="default: %(default)s")
    parser.add_argument("--viewers", type=int, default=20, help="default: %(default)s")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hangwatch-dashboard-") as folder:
        return 0 if run_benchmark(Path(folder), options.ranks, options.viewers) else 1


if __name__ == "__main__":
    sys.exit(main())
