"""The subcommands that follow ranks while they run: trace and record."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from hangwatch.protocol.live import MAX_RECORDING_HZ, MAX_RECORDING_S

from .argument_types import (
    parse_ranks,
    parse_recording_rate,
    parse_recording_seconds,
    parse_trace_seconds,
)
from .subcommands import Subcommands


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
