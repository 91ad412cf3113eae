"""Writing to the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

from hangwatch.text import Paint, clean


def paint(env: Mapping[str, str], stream: TextIO | None = None) -> Paint:
    """Colour on a terminal only, and not where NO_COLOR (no-color.org) or a dumb terminal speaks against it."""
    to = sys.stdout if stream is None else stream
    return Paint(colour=to.isatty() and not env.get("NO_COLOR") and env.get("TERM") != "dumb")


def say(lines: Iterable[str]) -> None:
    """Data: to stdout."""
    for line in lines:
        print(line)


def say_json(document: Any) -> None:
    print(json.dumps(document, indent=2))


def tell(message: str) -> None:
    """A message: to stderr. It may quote a job or a server, so it is cleaned, line by line."""
    print("hangwatch: " + "\n".join(map(clean, message.splitlines())), file=sys.stderr, flush=True)
