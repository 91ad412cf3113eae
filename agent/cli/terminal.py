"""Writes to the terminal: data to stdout, messages to stderr, long text through a pager, and views
that are refreshed, as for ``--watch``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hangwatch.report.text import clean_text, strip_style

from .errors import OK, NotFoundError, UnreachableError

_DEFAULT_PAGER = "less"
# less: exit if the text fits on one screen, show colours, and do not clear the screen at exit.
_LESS_OPTIONS = "FRX"
_REFRESH_S = 1.0
_CLEAR_SCREEN = "\x1b[H\x1b[2J"


def shows_style() -> bool:
    """Whether stdout is a terminal, NO_COLOR (no-color.org) is not set, and the terminal is not dumb."""
    is_plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not is_plain


def print_lines(lines: Iterable[str], *, flush: bool = False) -> None:
    """Prints data to stdout, with its style if stdout shows that."""
    is_styled = shows_style()
    for line in lines:
        print(line if is_styled else strip_style(line), flush=flush)


def print_result(args: argparse.Namespace, document: Any, lines: Iterable[str]) -> None:
    """Prints the document with ``--json``, else the lines."""
    print_lines([json.dumps(document, indent=2)] if args.json else lines)


def print_message(message: str) -> None:
    """Prints a message to stderr. It is cleaned line by line, since it may quote a job or a server."""
    cleaned = "\n".join(clean_text(line) for line in message.splitlines())
    print(f"hangwatch: {cleaned}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def show_progress() -> Iterator[Callable[[str], None]]:
    """Provides a function that shows a text in place of the one before, if stderr is a terminal. The
    text is erased at the end of the block.
    """

    def replace_line(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    try:
        yield replace_line
    finally:
        replace_line("")


def page_lines(lines: Iterable[str]) -> None:
    """Prints the lines, through the pager if stdout is a terminal."""
    env = os.environ
    command = shlex.split(env.get("PAGER", _DEFAULT_PAGER))
    if not command or command == ["cat"] or env.get("TERM") == "dumb" or not sys.stdout.isatty():
        print_lines(lines)
        return
    text = "".join(f"{line}\n" for line in lines)
    if not shows_style():
        text = strip_style(text)
    try:
        pager = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            env={"LESS": _LESS_OPTIONS, **env},
            text=True,
            errors="replace",
        )
    except OSError:  # the pager is not installed
        print(text, end="")
        return
    with contextlib.suppress(BrokenPipeError):  # the user has left the pager
        pager.communicate(text)
    while pager.poll() is None:
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is the pager's
            pager.wait()


def watch_view(args: argparse.Namespace, print_view: Callable[[], int]) -> int:
    """Prints the view and returns its exit code; with ``--watch``, prints it each second until
    Ctrl-C. A server that cannot be reached, and something that does not exist yet, are then waited
    for.
    """
    if not args.watch:
        return print_view()
    code = OK
    try:
        while True:
            if shows_style() and not args.json:
                print(_CLEAR_SCREEN, end="")
            try:
                code = print_view()
            except (UnreachableError, NotFoundError) as error:
                print_message(str(error))
                code = error.exit_code
            print(flush=True)
            time.sleep(_REFRESH_S)
    except KeyboardInterrupt:
        return code
