"""What can be typed after `hangwatch trace` and `hangwatch record`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from hangwatch.protocol.live import MAX_RECORDING_HZ, MAX_RECORDING_S

_MAX_TRACE_S = 86_400


def add_live_commands(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    parents: list[argparse.ArgumentParser],
    parse_ranks: Callable[[str], list[int]],
) -> None:
    """``ranks`` reads a list of ranks."""
    trace = commands.add_parser(
        "trace",
        parents=parents,
        help="the calls of some ranks as they make them, and how many of each",
    )
    trace.add_argument(
        "--rank",
        type=parse_ranks,
        required=True,
        metavar="RANKS",
        help="whose calls, such as 0 or 0,3-5",
    )
    trace.add_argument("--op", default="", help="only this operation, such as all_reduce")
    trace.add_argument(
        "--group", default="", help="only this process group, by its name or description"
    )
    trace.add_argument(
        "--values",
        action="store_true",
        help="what the tensors held, where the job runs with HANGWATCH_CHECKS=values",
    )
    trace.add_argument(
        "--seconds", type=_parse_seconds, metavar="N", help="end after so long (default: at Ctrl-C)"
    )

    record = commands.add_parser(
        "record", parents=parents, help="where ranks spend their time, sampled with py-spy"
    )
    record.add_argument(
        "--rank",
        type=parse_ranks,
        required=True,
        metavar="RANKS",
        help="which ranks, one after the other on each host",
    )
    record.add_argument(
        "--seconds",
        type=_parse_record_seconds,
        default=10,
        metavar="N",
        help=f"how long, 1 to {MAX_RECORDING_S} (default: 10)",
    )
    record.add_argument(
        "--rate",
        type=_parse_rate,
        default=100,
        metavar="HZ",
        help=f"samples a second, 1 to {MAX_RECORDING_HZ} (default: 100)",
    )
    record.add_argument(
        "--native",
        action="store_true",
        help="C and C++ frames too (pauses the process for each sample)",
    )
    record.add_argument(
        "--gil",
        action="store_true",
        help="only what holds the GIL, instead of all that a thread does or waits for",
    )
    record.add_argument(
        "--out",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="where the two files go (default: here)",
    )


def _parse_seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= _MAX_TRACE_S:
        raise argparse.ArgumentTypeError(
            f"{text!r} should be a number of seconds above 0, and at most {_MAX_TRACE_S}"
        )
    return value


def _parse_record_seconds(text: str) -> int:
    return _parse_whole_number(text, MAX_RECORDING_S, "seconds")


def _parse_rate(text: str) -> int:
    return _parse_whole_number(text, MAX_RECORDING_HZ, "samples a second")


def _parse_whole_number(text: str, maximum: int, unit: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and 1 <= int(text) <= maximum):
        raise argparse.ArgumentTypeError(
            f"{text!r} should be a whole number of {unit}, 1 to {maximum}"
        )
    return int(text)
