"""``python -m tests.torch_suite``: PyTorch's own DistributedTest, plain and watched, test by test."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.harness import native

from .comparison import TestRun, compare_tests, format_summary, list_tests

SMALL_WORLD = "small world size"  # why torch skips some tests


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse_arguments(argv)
    names = [name for name in list_tests() if re.search(arguments.match, name)]
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="hangwatch-torch-suite-"))
    problem_count = 0
    for world_size in arguments.world_sizes.split(","):
        comparison = compare_tests(
            names,
            folder / f"ranks{world_size}",
            _choose_recorder(arguments, folder),
            common_env={"WORLD_SIZE": world_size, "START_METHOD": arguments.start_method},
            job_count=arguments.jobs,
            server_flags=arguments.server_flags.split(),
            report=Progress(len(names)).report,
        )
        print("\n".join(format_summary(comparison)))
        problem_count += len(comparison.problems)
        names = [name for name, run in comparison.plain.items() if SMALL_WORLD in run.detail]
        if not names:
            break
    print(f"the tests' output: {folder}")
    return 1 if problem_count else 0


class Progress:
    """Prints a line for each test."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._shown: Counter[str] = Counter()

    def report(self, side: str, run: TestRun) -> None:
        self._shown[side] += 1
        place = f"{self._shown[side]:>3}/{self._count}"
        print(f"{side:<7} {place} {run.seconds:6.1f} s {run.outcome:<7} {run.name}", flush=True)


def _choose_recorder(arguments: argparse.Namespace, folder: Path) -> dict[str, str]:
    env = {"HANGWATCH_RECORDER": arguments.recorder}
    if arguments.recorder == "native":
        native.build_recorder(folder / "recorder")
        env["HANGWATCH_CACHE_DIR"] = str(folder / "recorder")
    if arguments.checks:
        env["HANGWATCH_CHECKS"] = arguments.checks
    return env


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.torch_suite", description=__doc__)
    parser.add_argument("--match", default="", help="a regular expression for the tests' names")
    parser.add_argument("--jobs", type=int, default=1, help="tests at a time (1)")
    parser.add_argument("--recorder", choices=["native", "python"], default="native")
    parser.add_argument("--checks", default="", help="HANGWATCH_CHECKS of the watched side")
    parser.add_argument("--start-method", choices=["fork", "spawn"], default="fork")
    parser.add_argument("--server-flags", default="", help="of hangwatch-server")
    parser.add_argument(
        "--world-sizes",
        default="4,8",
        help="comma-separated; each but the first runs the tests skipped in smaller worlds (4,8)",
    )
    parser.add_argument("--folder", type=Path, help="where the outputs go (a temporary folder)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
