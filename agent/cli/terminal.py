"""Writing to the terminal."""

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
    """Colour on a terminal only, and not where NO_COLOR (no-color.org) or a dumb terminal speaks
    against it.
    """
    to = sys.stdout if stream is None else stream
    return Paint(colour=to.isatty() and not env.get("NO_COLOR") and env.get("TERM") != "dumb")


def choose_paint(args: argparse.Namespace, env: Mapping[str, str]) -> Paint:
    """No colour with ``--json``; else as `detect_paint`."""
    return PLAIN_PAINT if args.json else detect_paint(env)


def print_lines(lines: Iterable[str]) -> None:
    """Data: to stdout."""
    for line in lines:
        print(line)


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))


def print_message(message: str) -> None:
    """A message: to stderr. It may quote a job or a server, so it is cleaned, line by line."""
    print(
        "hangwatch: " + "\n".join(map(clean_text, message.splitlines())),
        file=sys.stderr,
        flush=True,
    )


@contextmanager
def show_progress(label: str, stream: TextIO | None = None) -> Iterator[Callable[[int, int], None]]:
    """Gives a function that shows how many of how many are done: on a terminal, where there are
    many, for as long as the block takes.
    """
    to = sys.stderr if stream is None else stream
    shown = False

    def update_progress(done: int, of: int) -> None:
        nonlocal shown
        if of >= _MIN_PROGRESS_ITEMS and (done % _PROGRESS_STEP == 0 or done == of) and to.isatty():
            to.write(f"\r\x1b[Khangwatch: {label}: {done} of {of}")
            to.flush()
            shown = True

    try:
        yield update_progress
    finally:
        if shown:
            to.write("\r\x1b[K")
            to.flush()
