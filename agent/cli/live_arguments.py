"""What can be typed after `hangwatch trace` and `hangwatch record`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from hangwatch.protocol.live import MOST_RATE, MOST_SECONDS

_LONGEST_S = 86_400


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    parents: list[argparse.ArgumentParser],
    ranks: Callable[[str], list[int]],
) -> None:
    """``ranks`` reads a list of ranks."""
    trace = commands.add_parser("trace", parents=parents, help="the calls of some ranks as they make them, and how many of each")
    trace.add_argument("--rank", type=ranks, required=True, metavar="RANKS", help="whose calls, such as 0 or 0,3-5")
    trace.add_argument("--op", default="", help="only this operation, such as all_reduce")
    trace.add_argument("--group", default="", help="only this process group, by its name or description")
    trace.add_argument("--values", action="store_true", help="what the tensors held, where the job runs with HANGWATCH_CHECKS=values")
    trace.add_argument("--seconds", type=_seconds, metavar="N", help="end after so long (default: at Ctrl-C)")

    record = commands.add_parser("record", parents=parents, help="where ranks spend their time, sampled with py-spy")
    record.add_argument("--rank", type=ranks, required=True, metavar="RANKS", help="which ranks, one after the other on each host")
    record.add_argument("--seconds", type=_recorded, default=10, metavar="N", help=f"how long, 1 to {MOST_SECONDS} (default: 10)")
    record.add_argument("--rate", type=_rate, default=100, metavar="HZ", help=f"samples a second, 1 to {MOST_RATE} (default: 100)")
    record.add_argument("--native", action="store_true", help="C and C++ frames too (pauses the process for each sample)")
    record.add_argument("--gil", action="store_true", help="only what holds the GIL, instead of all that a thread does or waits for")
    record.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="where the two files go (default: here)")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= _LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text!r} should be a number of seconds above 0, and at most {_LONGEST_S}")
    return value


def _recorded(text: str) -> int:
    return _whole(text, MOST_SECONDS, "seconds")


def _rate(text: str) -> int:
    return _whole(text, MOST_RATE, "samples a second")


def _whole(text: str, most: int, what: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and 1 <= int(text) <= most):
        raise argparse.ArgumentTypeError(f"{text!r} should be a whole number of {what}, 1 to {most}")
    return int(text)
