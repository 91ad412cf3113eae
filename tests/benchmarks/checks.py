"""What HANGWATCH_CHECKS costs a sampled call, by the size of its tensor: ``python -m
tests.benchmarks.checks``.

Two ranks broadcast on gloo, in fresh processes for each check, and every call is sampled. Only the
check inside the recorder is timed, because the time of a broadcast itself varies by a factor of
four. The check covers the input of the root and the results of both ranks.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from tests.harness.job import running_job
from tests.harness.server import running_server

CHECKS = ("replicas", "nonfinite", "values")
SIZES_BYTES = (1 << 10, 64 << 10, 1 << 20, 25 << 20, 100 << 20)  # bytes
ROOT = Path(__file__).parents[2]
CALLS_PER_SIZE = 30  # of each size


def run_child() -> None:
    """Prints the median microseconds of looking at a call, by size."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank: Any = sys.modules["hangwatch.agent.recorder.installation"]
    checker, spent_s = rank.current_rank.recorder.checker, [0.0]

    def time_function(function: Callable[..., Any]) -> Callable[..., Any]:
        def timed_function(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args)
            finally:
                spent_s[0] += time.perf_counter() - began

        return timed_function

    checker.check_inputs = time_function(checker.check_inputs)
    checker._check_outputs = time_function(checker._check_outputs)
    times_by_size = {}
    for size in SIZES_BYTES:
        tensor, times = torch.randn(size // 4), []
        for _ in range(CALLS_PER_SIZE):
            spent_s[0] = 0.0
            dist.broadcast(tensor, 0)
            times.append(spent_s[0])
        times_by_size[size] = median(times) * 1e6
    if dist.get_rank() == 0:
        Path(os.environ["BENCHMARK_OUT"]).write_text(json.dumps(times_by_size))
    dist.destroy_process_group()


def main() -> None:
    times_by_check: dict[str, dict[str, float]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="hangwatch-checks-") as name,
        running_server(Path(name, "server")) as server,
    ):
        for check in CHECKS:
            out = Path(name, f"{check}.json")
            env = {
                "HANGWATCH_CHECKS": check,
                "HANGWATCH_CHECK_EVERY": "1",
                "PYTHONPATH": str(ROOT),
                "BENCHMARK_OUT": str(out),
            }
            with running_job(
                Path(__file__), 2, Path(name, check), server.url, env=env, args=["--child"]
            ) as job:
                if job.process.wait(120):
                    raise SystemExit(job.stderr)
            times_by_check[check] = json.loads(out.read_text())
    print(f"{'µs for a call of':<20}" + "".join(f"{check:>12}" for check in CHECKS))
    for size in map(str, SIZES_BYTES):
        print(
            f"{int(size) / 1024:>14.0f} KiB  "
            + "".join(f"{times_by_check[check][size]:>12.0f}" for check in CHECKS)
        )


if __name__ == "__main__":
    run_child() if "--child" in sys.argv else main()
