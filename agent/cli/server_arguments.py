"""The subcommands that show the server's view: status, incidents, show, report, dump and perf."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from hangwatch.model.kinds import VerdictKind

from .argument_types import parse_positive, parse_ranks
from .subcommands import Subcommands


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
    from .commands.report import run_report

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
