"""Runs the programs and prints a table of their verdicts: ``python -m tests.programs [NAME...] [--repeat 3] [--stall-after 4]``."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.harness import expected
from tests.harness.verdicts import Outcome, check


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description="Real hangs and healthy jobs, and their verdicts.")
    known = expected.names(healthy=False) + expected.names(healthy=True)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each (1)")
    parser.add_argument("--stall-after", type=float, default=4.0, help="the server's limit in seconds (4)")
    parser.add_argument("--parallel", type=int, default=2, help="jobs at a time (2)")
    parser.add_argument("--details", action="store_true", help="the incidents and logs of those that fail")
    told = parser.parse_args(argv)
    if unknown := set(told.names) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")

    runs = [name for name in told.names or known for _ in range(told.repeat)]
    print(f"{'program':<26} {'verdict':<34} {'seconds':>7}  ok", flush=True)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="hangwatch-programs-") as folder, ThreadPoolExecutor(told.parallel) as pool:
        jobs = [(name, Path(folder, f"{number}-{name}")) for number, name in enumerate(runs)]
        for outcome in pool.map(lambda job: check(job[0], job[1], told.stall_after), jobs):
            failed += not outcome.ok
            print(_row(outcome), flush=True)
            if told.details and not outcome.ok:
                print(outcome, flush=True)
    print(f"{len(runs) - failed} of {len(runs)} as expected")
    return 1 if failed else 0


def _row(outcome: Outcome) -> str:
    seconds = "" if outcome.seconds is None else f"{outcome.seconds:.1f}"
    judged = "yes" if outcome.ok else "NO: " + "; ".join(outcome.problems)
    return f"{outcome.name:<26} {outcome.verdict:<34} {seconds:>7}  {judged}"


if __name__ == "__main__":
    sys.exit(main())
