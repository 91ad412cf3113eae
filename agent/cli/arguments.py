"""The options that several commands share, and the values of their arguments.

Each parser of a value raises argparse.ArgumentTypeError with a message that names the invalid part
and shows what is expected.
"""

from __future__ import annotations

import argparse

from hangwatch.model.ranks import parse_rank_ranges

DEFAULT_URL = "http://127.0.0.1:8642"
_MAX_LISTED_RANKS = 65_536
_MAX_NUMBER = 999_999_999


def add_query_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a command that shows the server's view, of all jobs or of one."""
    add_server_options(parser)
    parser.add_argument("--job", help="only this job")
    add_format_option(parser)


def add_server_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help=f"the server (default: HANGWATCH_URL, else {DEFAULT_URL})")
    parser.add_argument(
        "--token", help="its token (default: the one in the URL, else HANGWATCH_TOKEN)"
    )


def add_format_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the API's documents instead of text")


def parse_ranks(text: str) -> list[int]:
    """Parses a list of ranks and ranges, ``0,3-5``, into ascending rank numbers."""
    ranks: set[int] = set()
    try:
        ranges = parse_rank_ranges(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    for first, last in ranges:
        if last - first + len(ranks) >= _MAX_LISTED_RANKS:
            raise argparse.ArgumentTypeError(
                f"more than {_MAX_LISTED_RANKS} ranks: select fewer of them"
            )
        ranks.update(range(first, last + 1))
    return sorted(ranks)


def parse_positive(
    text: str, maximum: int = _MAX_NUMBER, expected: str = "a whole number above 0"
) -> int:
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(_MAX_NUMBER))
    if not is_number or not 1 <= int(text) <= maximum:
        raise argparse.ArgumentTypeError(f"{text!r} should be {expected}")
    return int(text)
