"""From what was typed to an exit code. All errors that are foreseen end here, as one message on
stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Mapping, Sequence

from .arguments import build_parser
from .errors import ERROR, INTERRUPTED, CliError
from .terminal import print_message


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. Raises SystemExit for ``--help`` and for what
    cannot be parsed (2).
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(
            stream, io.TextIOWrapper
        ):  # a job's text, or our own marks, may be more than the terminal can show
            stream.reconfigure(errors="replace")
    args = build_parser().parse_args(argv)
    try:
        code = _dispatch_command(args, os.environ)
        sys.stdout.flush()
        return code
    except CliError as error:
        print_message(str(error))
        return error.exit_code
    except BrokenPipeError:  # as in `hangwatch incidents | head`
        with contextlib.suppress(OSError):  # nothing to redirect where stdout is no file
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ERROR
    except KeyboardInterrupt:
        return INTERRUPTED


def _dispatch_command(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    # Each command imports what it needs: `hangwatch --help` needs no HTTP client.
    if args.command == "doctor":
        from .doctor.command import run_doctor as doctor

        return doctor(args)
    if args.command == "demo":
        from .demo.command import run_demo as demo

        return demo(args, env)
    if args.command == "analyze":
        from .analyze.command import run_analyze as analyze

        return analyze(args, env)
    if args.command == "trace":
        from .commands.trace import run_trace as trace

        return trace(args, env)
    if args.command == "record":
        from .commands.record import run_record as record

        return record(args, env)
    if args.command == "perf":
        from .commands.performance import run_perf as perf

        return perf(args, env)
    from .commands.incidents import run_command

    return run_command(args, env)
