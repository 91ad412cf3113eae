"""What HANGWATCH_CHECKS costs a call that is sampled, by the size of its tensor: ``python -m tests.benchmarks.checks``.

A broadcast on a backend that does nothing, in a fresh process for each check, every call sampled: what is added to the same call
that is only recorded is the check's.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.benchmarks.workload import start_nothing
from tests.harness.job import running
from tests.harness.server import serving

CHECKS = ("", "replicas", "nonfinite", "values")
SIZES = (1 << 10, 64 << 10, 1 << 20, 25 << 20, 100 << 20)  # bytes
ROOT = Path(__file__).parents[2]
SECONDS = 1.0  # for each size


def child() -> None:
    """Prints the median microseconds of a call, by size."""
    start_nothing()
    torch.set_num_threads(1)
    found = {}
    for size in SIZES:
        tensor, times = torch.randn(size // 4), []
        until = time.perf_counter() + SECONDS
        while time.perf_counter() < until or len(times) < 10:
            began = time.perf_counter()
            dist.broadcast(tensor, 0)
            times.append(time.perf_counter() - began)
        found[size] = sorted(times)[len(times) // 2] * 1e6
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def main() -> None:
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="hangwatch-checks-") as name, serving(Path(name, "server")) as server:
        for check in CHECKS:
            env = {"HANGWATCH_CHECKS": check, "HANGWATCH_CHECK_EVERY": "1", "HANGWATCH_RECORDER": "python", "PYTHONPATH": str(ROOT)}
            with running(Path(__file__), 1, Path(name, check or "none"), server.url, env=env, args=["--child"]) as job:
                if job.process.wait(120):
                    raise SystemExit(job.stderr)
            found[check] = json.loads(job.stdout)
    print(f"{'added to a call, µs':<20}" + "".join(f"{check:>12}" for check in CHECKS[1:]))
    for size in map(str, SIZES):
        added = (found[check][size] - found[""][size] for check in CHECKS[1:])
        print(f"{int(size) / 1024:>14.0f} KiB  " + "".join(f"{max(0.0, number):>12.1f}" for number in added))


if __name__ == "__main__":
    child() if "--child" in sys.argv else main()
