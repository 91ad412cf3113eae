"""Runs the command that was typed and returns its exit code. Every expected error ends here, as one
message on stderr.

MERGED: The parser of the `hangwatch` command.

Each subcommand is declared by one function in `server_arguments`, `live_arguments` or
`local_arguments`: its arguments, its help, and ``run``, which imports the module that implements
it. So `hangwatch --help` loads no HTTP client.

MERGED: Adds subcommands with the options that several of them share.

MERGED: Parsers for the values of arguments. Each raises argparse.ArgumentTypeError with a message that
names the invalid part and shows what is expected.

MERGED: The subcommands that work on this machine: demo, analyze and doctor.

MERGED: The subcommands that show the server's view: status, incidents, show, report, dump and perf.

MERGED: The subcommands that follow ranks while they run: trace and record.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hangwatch import __version__
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.ranks import parse_rank_ranges
from hangwatch.protocol.commands import MAX_RECORDING_HZ, MAX_RECORDING_S

from .errors import ERROR, INTERRUPTED, CliError
from .terminal import print_message


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. Raises SystemExit for ``--help`` (0) and for
    usage errors (2).
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A job's text, or our own symbols, may not be encodable for this terminal.
            stream.reconfigure(errors="replace")
    args = build_parser().parse_args(argv)
    try:
        code: int = args.run(args, os.environ)
        sys.stdout.flush()
        return code
    except CliError as error:
        print_message(str(error))
        return error.exit_code
    except BrokenPipeError:  # as in `hangwatch incidents | head`
        with contextlib.suppress(OSError):  # stdout is not a file
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ERROR
    except KeyboardInterrupt:
        return INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """The parsed arguments have ``run``, see `subcommands.Run`."""
    parser = argparse.ArgumentParser(
        prog="hangwatch",
        description="Names the rank, the call and the line that hang a distributed PyTorch job.",
        epilog=(
            "Exit codes: 0 healthy or done, 1 error, 2 usage, 3 server unreachable, 4 a hang is"
            " open (status, analyze)."
        ),
    )
    parser.add_argument("--version", action="version", version=f"hangwatch {__version__}")
    subcommands = Subcommands(parser)
    add_demo(subcommands)
    add_status(subcommands)
    add_incidents(subcommands)
    add_show(subcommands)
    add_report(subcommands)
    add_dump(subcommands)
    add_perf(subcommands)
    add_trace(subcommands)
    add_record(subcommands)
    add_analyze(subcommands)
    add_mcp(subcommands)
    add_token(subcommands)
    add_doctor(subcommands)
    return parser


# Runs a subcommand: takes its parsed arguments and the environment, returns the exit code, and
# raises `errors.CliError`.
Run = Callable[[argparse.Namespace, Mapping[str, str]], int]


class Subcommands:
    """The subcommands of one parser."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
        self._format_options = _build_format_options()
        self._server_options = _build_server_options()
        self._job_options = _build_job_options()

    def add(
        self,
        name: str,
        run: Run,
        *,
        has_server: bool = False,
        has_job: bool = False,
        help: str,  # argparse's name for it
        **details: Any,
    ) -> argparse.ArgumentParser:
        """Adds a subcommand with ``--json``; with ``--url`` and ``--token`` if it has a server, and
        ``--job`` if it can be limited to one. ``details`` are further arguments of `add_parser`.
        """
        parents = []
        if has_server:
            parents.append(self._server_options)
        if has_job:
            parents.append(self._job_options)
        parents.append(self._format_options)
        parser: argparse.ArgumentParser = self._parsers.add_parser(
            name, parents=parents, help=help, **details
        )
        parser.set_defaults(run=run)
        return parser


def _build_format_options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--json", action="store_true", help="the API's documents instead of text")
    return options


def _build_server_options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument(
        "--url", help="the server (default: HANGWATCH_URL, else http://127.0.0.1:8642)"
    )
    options.add_argument(
        "--token", help="its token (default: the one in the URL, else HANGWATCH_TOKEN)"
    )
    return options


def _build_job_options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--job", help="only this job")
    return options


MAX_LISTED_RANKS = 65_536
_MAX_TRACE_S = 86_400
_MAX_DIGITS = 9


def parse_ranks(text: str) -> list[int]:
    """Parses a list of ranks and ranges, ``0,3-5``, into ascending rank numbers."""
    ranks: set[int] = set()
    try:
        ranges = parse_rank_ranges(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    for first, last in ranges:
        if last - first + len(ranks) >= MAX_LISTED_RANKS:
            raise argparse.ArgumentTypeError(
                f"more than {MAX_LISTED_RANKS} ranks: select fewer of them"
            )
        ranks.update(range(first, last + 1))
    return sorted(ranks)


def parse_positive(text: str) -> int:
    if not _is_number(text) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} should be a whole number above 0")
    return int(text)


def parse_trace_seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= _MAX_TRACE_S:
        raise argparse.ArgumentTypeError(
            f"{text!r} should be a number of seconds above 0, and at most {_MAX_TRACE_S}"
        )
    return value


def parse_recording_seconds(text: str) -> int:
    return _parse_whole_number(text, MAX_RECORDING_S, "seconds")


def parse_recording_rate(text: str) -> int:
    return _parse_whole_number(text, MAX_RECORDING_HZ, "samples a second")


def _parse_whole_number(text: str, maximum: int, unit: str) -> int:
    if not _is_number(text) or not 1 <= int(text) <= maximum:
        raise argparse.ArgumentTypeError(
            f"{text!r} should be a whole number of {unit}, 1 to {maximum}"
        )
    return int(text)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS


def add_demo(subcommands: Subcommands) -> None:
    parser = subcommands.add(
        "demo",
        _run_demo,
        help="show on this machine what a verdict looks like, in under a minute",
    )
    parser.add_argument(
        "--keep", action="store_true", help="leave the server and the hung job running until Ctrl-C"
    )


def _run_demo(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    from .demo.command import run_demo

    return run_demo(args, env)


def add_analyze(subcommands: Subcommands) -> None:
    parser = subcommands.add(
        "analyze",
        _run_analyze,
        help="the diagnosis from files: Flight Recorder dumps, or a bundle",
        description=(
            "Diagnoses from files, without a server and without the job: PyTorch Flight Recorder"
            " dumps (pickle or JSON), one for each rank, or a bundle that hangwatch wrote. Ranks may"
            " be missing. Files that cannot be read are reported and skipped."
        ),
        epilog=(
            "Exit codes: 0 no hang found, 1 no file could be read or a file tries to run code,"
            " 2 usage, 4 a hang. torch keeps the calls for dumps if TORCH_FR_BUFFER_SIZE (formerly"
            " TORCH_NCCL_TRACE_BUFFER_SIZE) is above 0. `curl -O` of /api/v1/incidents/ID/bundle"
            " downloads a bundle."
        ),
    )
    parser.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="dumps whose names end with their rank, bundles, or folders of these",
    )
    parser.add_argument(
        "--export",
        type=Path,
        metavar="DIR",
        help="write the calls of a single bundle to DIR as Flight Recorder dumps",
    )


def _run_analyze(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    from .analyze import run_analyze

    return run_analyze(args, env)


def add_token(subcommands: Subcommands) -> None:
    parser = subcommands.add(
        "token",
        _run_token,
        help="a token with which one job can report itself, and no other job",
        description=(
            "Prints a token for one job, derived from the server's. A job that is started with it"
            " can report itself, but no other job, and cannot read the API."
        ),
        epilog="Example: HANGWATCH_TOKEN=$(hangwatch token --job run7) HANGWATCH_JOB=run7 torchrun …",
    )
    parser.add_argument("--job", required=True, help="the job's name, as in HANGWATCH_JOB")
    parser.add_argument(
        "--token",
        help="the server's token (default: the one in HANGWATCH_URL, else HANGWATCH_TOKEN)",
    )


def _run_token(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    from .commands.token import print_job_token

    return print_job_token(args, env)


def add_doctor(subcommands: Subcommands) -> None:
    subcommands.add(
        "doctor",
        _run_doctor,
        has_server=True,
        help="what would keep hangwatch from working here, and the remedy",
    )


def _run_doctor(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    from .doctor.command import run_doctor

    return run_doctor(args, env)


def add_status(subcommands: Subcommands) -> None:
    parser = subcommands.add(
        "status",
        _run_status,
        has_server=True,
        has_job=True,
        help="every job on one line, with its open incidents",
    )
    parser.add_argument("--watch", action="store_true", help="refresh every second, until Ctrl-C")


def _run_status(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    from .commands.status import run_status

    return run_status(args, env)


def add_incidents(subcommands: Subcommands) -> None:
    parser = subcommands.add(
        "incidents",
        _run_incidents,
        has_server=True,
        has_job=True,
        help="the incidents, newest first",
    )
    parser.add_argument("--status", choices=("open", "resolved"), help="only these")
    parser.add_argument(
        "--kind",
        choices=[kind.value for kind in VerdictKind],
        metavar="KIND",
        help="only this kind, such as missing_rank",
    )
    parser.add_argument(
        "--limit",
        type=parse_positive,
        default=20,
        metavar="N",
        help="at most N incidents (default: 20)",
    )


def _run_incidents(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    from .commands.incidents import run_incidents

    return run_incidents(args, env)


def add_show(subcommands: Subcommands) -> None:
    parser = subcommands.add(
        "show",
        _run_show,
        has_server=True,
        has_job=True,
        help="one incident: the verdict, the calls, the stacks",
    )
    parser.add_argument(
        "id",
        nargs="?",
        metavar="ID",
        help="its id, or the beginning of it (default: the newest incident)",
    )
    parser.add_argument("--full", action="store_true", help="show all frames, also of libraries")
    parser.add_argument(
        "--watch",
        action="store_true",
        help="refresh every second until Ctrl-C; waits for an incident",
    )
    parser.add_argument(
        "--no-pager", action="store_true", help="print all at once, not through PAGER or less"
    )


def _run_show(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    from .commands.incidents import run_show

    return run_show(args, env)


def add_report(subcommands: Subcommands) -> None:
    parser = subcommands.add(
        "report",
        _run_report,
        has_server=True,
        has_job=True,
        help="save an incident as one HTML file, which needs no server",
    )
    parser.add_argument(
        "id",
        nargs="?",
        metavar="ID",
        help="its id, or the beginning of it (default: the newest incident)",
    )
    parser.add_argument(
        "--out",
        "-o",
        default="",
        metavar="FILE",
        help="the file or its folder; - for stdout (default: hangwatch-ID.html)",
    )


def _run_report(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    from .commands.incidents import run_report

    return run_report(args, env)


def add_dump(subcommands: Subcommands) -> None:
    parser = subcommands.add(
        "dump",
        _run_dump,
        has_server=True,
        has_job=True,
        help="take and show the stacks of some ranks now",
    )
    parser.add_argument("ranks", type=parse_ranks, metavar="RANKS", help="such as 0,3-5")
    parser.add_argument(
        "--native",
        action="store_true",
        help="include C and C++ frames (slow: the first dump takes seconds)",
    )
    parser.add_argument(
        "--timeout",
        type=parse_positive,
        metavar="SECONDS",
        help="how long to wait for the stacks (default: 15, native 60)",
    )


def _run_dump(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    from .commands.dump import run_dump

    return run_dump(args, env)


def add_perf(subcommands: Subcommands) -> None:
    subcommands.add(
        "perf",
        _run_perf,
        has_server=True,
        has_job=True,
        help="calls, latency, bandwidth; which rank the others wait for",
    )


def _run_perf(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    from .commands.performance import run_perf

    return run_perf(args, env)


def add_mcp(subcommands: Subcommands) -> None:
    subcommands.add(
        "mcp",
        _run_mcp,
        has_server=True,
        help="serve coding agents over the Model Context Protocol, on stdin and stdout",
        description=(
            "Serves the server's view to a coding agent, read-only, over the Model Context Protocol on"
            " stdin and stdout: the agent's program starts this command. It needs the extra"
            " hangwatch[mcp]. The server itself answers at /mcp, with the token."
        ),
        epilog="Example: claude mcp add hangwatch -- hangwatch mcp --url http://master:8642",
    )


def _run_mcp(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    from .commands.mcp import run_mcp

    return run_mcp(args, env)


def add_trace(subcommands: Subcommands) -> None:
    parser = subcommands.add(
        "trace",
        _run_trace,
        has_server=True,
        has_job=True,
        help="show the calls of some ranks as they make them, then the counts",
    )
    parser.add_argument(
        "--rank",
        type=parse_ranks,
        required=True,
        metavar="RANKS",
        help="the ranks to trace, such as 0 or 0,3-5",
    )
    parser.add_argument("--op", default="", help="only this operation, such as all_reduce")
    parser.add_argument(
        "--group", default="", help="only this process group, by its name or description"
    )
    parser.add_argument(
        "--values",
        action="store_true",
        help="include tensor statistics, if the job runs with HANGWATCH_CHECKS=values",
    )
    parser.add_argument(
        "--seconds",
        type=parse_trace_seconds,
        metavar="N",
        help="stop after N seconds (default: at Ctrl-C)",
    )


def _run_trace(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    from .commands.trace import run_trace

    return run_trace(args, env)


def add_record(subcommands: Subcommands) -> None:
    parser = subcommands.add(
        "record",
        _run_record,
        has_server=True,
        has_job=True,
        help="where ranks spend their time, sampled with py-spy",
    )
    parser.add_argument(
        "--rank",
        type=parse_ranks,
        required=True,
        metavar="RANKS",
        help="the ranks to record, one after the other on each host",
    )
    parser.add_argument(
        "--seconds",
        type=parse_recording_seconds,
        default=10,
        metavar="N",
        help=f"duration, 1 to {MAX_RECORDING_S} (default: 10)",
    )
    parser.add_argument(
        "--rate",
        type=parse_recording_rate,
        default=100,
        metavar="HZ",
        help=f"samples a second, 1 to {MAX_RECORDING_HZ} (default: 100)",
    )
    parser.add_argument(
        "--native",
        action="store_true",
        help="include C and C++ frames (pauses the process for each sample)",
    )
    parser.add_argument(
        "--gil",
        action="store_true",
        help="only threads that hold the GIL, instead of everything that a thread does or waits for",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="the folder for the two files (default: the current one)",
    )


def _run_record(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    from .commands.record import run_record

    return run_record(args, env)
