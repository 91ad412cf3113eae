"""Runs tests of torch's own DistributedTest, each in processes of its own, and writes one JSON
document a line to stdout. ``worker.py --list`` prints their names instead.

Whether the ranks are watched is up to the environment.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("BACKEND", "gloo")
os.environ.setdefault("WORLD_SIZE", "3")  # what torch's own run of these tests has for gloo

from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

# A fork has torch and the tests imported already: a rank starts in 0.1 s, not in 5. "spawn" is what
# torch's own run of these tests does.
START_METHOD = os.environ.get("START_METHOD", "fork")


class TestDistributed(TestDistBackend, DistributedTest._DistTestBase):
    """The main process starts a process per rank, as in torch's own `test_distributed_spawn.py`."""

    exit_codes: list[int | None]

    def setUp(self) -> None:
        super().setUp()  # type: ignore[no-untyped-call]
        self.exit_codes = []
        context: Any = multiprocessing.get_context(START_METHOD)
        self._start_processes(context.Process)

    def _check_return_codes(self, fn: Callable[..., None], elapsed_time: float) -> None:
        for process in self.processes:  # some are being terminated
            process.join(10)
        self.exit_codes = [process.exitcode for process in self.processes]
        super()._check_return_codes(fn, elapsed_time)


def list_tests() -> list[str]:
    return [name for name in dir(TestDistributed) if name.startswith("test_")]


def run_test(name: str, output: Path) -> dict[str, object]:
    job = name + os.environ.get("JOB_SUFFIX", "")  # a test that runs again is another job
    os.environ["HANGWATCH_JOB"] = job
    case, result, start = TestDistributed(name), unittest.TestResult(), time.monotonic()
    kept = os.dup(1), os.dup(2)
    with output.open("wb") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            case.run(result)  # type: ignore[no-untyped-call]
        finally:
            sys.stdout.flush()
            for number, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, number)
                os.close(copy)
    outcome, detail = "passed", ""
    if result.skipped:
        outcome, detail = "skipped", result.skipped[0][1]
    elif result.errors or result.failures:
        outcome, detail = "failed", (result.errors + result.failures)[0][1]
    return {
        "name": name,
        "job": job,
        "outcome": outcome,
        "detail": detail,
        "exit_codes": getattr(case, "exit_codes", []),
        "seconds": round(time.monotonic() - start, 2),
    }


def main(arguments: list[str]) -> None:
    if arguments == ["--list"]:
        print("\n".join(list_tests()))
        return
    folder, names = Path(arguments[0]), arguments[1:]
    tempfile.tempdir = str(folder)
    TestDistributed.setUpClass()  # type: ignore[no-untyped-call]
    for name in names:
        print(json.dumps(run_test(name, folder / f"{name}.txt")), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
