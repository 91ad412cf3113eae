"""Shows long text page by page on a terminal, as git does: with PAGER, else with less."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping

from .terminal import print_lines

_DEFAULT_PAGER = "less"
# less: exit if the text fits on one screen, show colours, and do not clear the screen at exit.
_LESS_OPTIONS = "FRX"


def page_lines(lines: Iterable[str], env: Mapping[str, str]) -> None:
    """Prints the lines, through the pager if stdout is a terminal."""
    command = shlex.split(env.get("PAGER", _DEFAULT_PAGER))
    if not command or command == ["cat"] or env.get("TERM") == "dumb" or not sys.stdout.isatty():
        print_lines(lines)
        return
    text = "".join(f"{line}\n" for line in lines)
    try:
        pager = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            env={"LESS": _LESS_OPTIONS, **env},
            text=True,
            errors="replace",
        )
    except OSError:  # it is not installed
        print(text, end="")
        return
    with contextlib.suppress(BrokenPipeError):  # the user has left it
        pager.communicate(text)
    while pager.poll() is None:
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is the pager's
            pager.wait()
