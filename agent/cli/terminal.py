"""Writes to the terminal: data to stdout, messages to stderr."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from hangwatch.report.text import PLAIN_PAINT, Paint, clean_text

_MIN_PROGRESS_ITEMS, _PROGRESS_STEP = 32, 8


def detect_paint(env: Mapping[str, str], stream: TextIO | None = None) -> Paint:
    """Colour on a terminal only, unless NO_COLOR (no-color.org) is set or the terminal is dumb."""
    output = sys.stdout if stream is None else stream
    is_plain = bool(env.get("NO_COLOR")) or env.get("TERM") == "dumb"
    return Paint(colour=output.isatty() and not is_plain)


def choose_paint(args: argparse.Namespace, env: Mapping[str, str]) -> Paint:
    """No colour with ``--json``; else as `detect_paint`."""
    return PLAIN_PAINT if args.json else detect_paint(env)


def print_lines(lines: Iterable[str]) -> None:
    """Prints data to stdout."""
    for line in lines:
        print(line)


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))


def print_message(message: str) -> None:
    """Prints a message to stderr. It is cleaned line by line, since it may quote a job or a server."""
    cleaned = "\n".join(clean_text(line) for line in message.splitlines())
    print(f"hangwatch: {cleaned}", file=sys.stderr, flush=True)


@contextmanager
def show_progress(label: str, stream: TextIO | None = None) -> Iterator[Callable[[int, int], None]]:
    """Provides a function that shows the progress, (done, total), on a terminal if there are many
    items. It is erased at the end of the block.
    """
    output = sys.stderr if stream is None else stream
    is_shown = False

    def update_progress(done: int, total: int) -> None:
        nonlocal is_shown
        if total < _MIN_PROGRESS_ITEMS or not output.isatty():
            return
        if done % _PROGRESS_STEP == 0 or done == total:
            output.write(f"\r\x1b[Khangwatch: {label}: {done} of {total}")
            output.flush()
            is_shown = True

    try:
        yield update_progress
    finally:
        if is_shown:
            output.write("\r\x1b[K")
            output.flush()
