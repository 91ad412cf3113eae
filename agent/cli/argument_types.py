"""Parsers for the values of arguments. Each raises argparse.ArgumentTypeError with a message that
names the invalid part and shows what is expected.
"""

from __future__ import annotations

import argparse

from hangwatch.model.ranks import parse_rank_ranges
from hangwatch.protocol.live import MAX_RECORDING_HZ, MAX_RECORDING_S

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
