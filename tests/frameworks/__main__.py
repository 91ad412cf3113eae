"""Runs the programs of the frameworks and prints their verdicts: ``python -m tests.frameworks``. The first run installs the frameworks."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from functools import partial

from tests.harness import expected
from tests.harness.environments import is_installed
from tests.harness.verdicts import check_program
from tests.zoo.runs import run_programs

from .environment import (
    FrameworksUnavailableError,
    environment_folder,
    frameworks_runtime,
    install_frameworks,
)

EXIT_UNAVAILABLE = 5
STALL_AFTER_S = 8.0


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse_arguments(argv)
    if not is_installed(environment_folder()):
        print(f"installing the frameworks into {environment_folder()}", file=sys.stderr, flush=True)
        try:
            install_frameworks()
        except FrameworksUnavailableError as error:
            print(error, file=sys.stderr)
            return EXIT_UNAVAILABLE
    if arguments.install:
        return 0
    # Without this, the jobs under way would stay.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    programs = {
        name: expected.load_expected(name)
        for is_healthy in (False, True)
        for name in expected.list_programs(
            healthy=is_healthy, ci=arguments.ci, backend="frameworks"
        )
    }
    wanted = [name for name in programs if _is_wanted(name, arguments.names)]
    if not wanted:
        print(f"no such program; there are {', '.join(programs)}", file=sys.stderr)
        return 2
    return run_programs(
        programs,
        wanted * arguments.repeat,
        partial(check_program, stall_after_s=arguments.stall_after, runtime=frameworks_runtime()),
        job_count=arguments.jobs,
        shows_details=arguments.details,
    )


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.frameworks",
        description="Hangs and healthy jobs of training frameworks, and their verdicts.",
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="programs whose names begin so (all)"
    )
    parser.add_argument("--install", action="store_true", help="only install the frameworks")
    parser.add_argument("--ci", action="store_true", help="only the part that CI runs")
    parser.add_argument("--jobs", type=int, default=1, help="programs at a time (1)")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each (1)")
    parser.add_argument(
        "--stall-after",
        type=float,
        default=STALL_AFTER_S,
        help=f"the server's limit in seconds ({STALL_AFTER_S:g})",
    )
    parser.add_argument(
        "--details", action="store_true", help="the incidents and logs of those that fail"
    )
    return parser.parse_args(argv)


def _is_wanted(name: str, beginnings: Sequence[str]) -> bool:
    short = name.removeprefix("frameworks/")
    return not beginnings or any(short.startswith(beginning) for beginning in beginnings)


if __name__ == "__main__":
    sys.exit(main())
