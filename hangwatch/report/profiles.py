"""Where a rank spends its time, as lines of text: pure, from the API's JSON documents. See
`hangwatch.report.terminal`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .text import (
    PLAIN_PAINT,
    TERMINAL_COLUMNS,
    Paint,
    clean_text,
    truncate_end,
    truncate_start,
    wrap_text,
)

Document = Mapping[str, Any]

_MIN_SHARE = 0.02  # of a thread's samples: what is less is not shown
_MIN_LOCATION_WIDTH = 16  # columns that a place gets at the least: of a path, the end tells most
_MAX_TREE_LINES = 40  # of a thread's tree, the heaviest branches first
_INSTALL_PREFIX = re.compile(r"^.*(?:/(?:site|dist)-packages|/lib(?:64)?/python3[.\d]*)/")


def format_recording(document: Document, paint: Paint = PLAIN_PAINT) -> Iterator[str]:
    """All ranks: a sentence on where each is most of its time, and a tree from the outside in."""
    for i, rank in enumerate(document.get("ranks") or []):
        if i:
            yield ""
        yield from _format_rank(
            rank, int(document.get("rate") or 1), bool(document.get("gil")), paint
        )


def _format_rank(rank: Document, rate_hz: int, gil_only: bool, paint: Paint) -> Iterator[str]:
    name = f"rank {rank.get('rank')}"
    if rank.get("error"):
        yield paint.bold(name)
        yield from (paint.as_warning(line) for line in wrap_text(rank["error"], indent="  ! "))
        return
    if rank.get("note"):
        yield from (paint.as_warning(line) for line in wrap_text(f"{name}: {rank['note']}"))
    for i, thread in enumerate(rank.get("threads") or []):
        if i:
            yield ""
        samples = int(thread.get("samples") or 0)
        time = "" if gil_only else f" · {rank.get('seconds', 0):.1f} s at {rate_hz} Hz"
        holding = " that hold the GIL" if gil_only else ""
        yield (
            f"{paint.bold(name)} · {clean_text(thread.get('thread', '?'))}{time} · {samples:,}"
            f" samples{holding}"
        )
        yield from wrap_text(_format_hottest(thread, samples))
        yield from _format_tree(thread.get("tree") or [], samples, paint)
    if not rank.get("threads"):
        yield f"{paint.bold(name)}: no sample{' held the GIL' if gil_only else ' was taken'}"
    if rank.get("resting"):
        many = int(rank["resting"])
        yield paint.dim(
            f"and {many} thread{'s' if many > 1 else ''} that waited in one line of a library all"
            " the time"
        )


def _format_hottest(thread: Document, samples: int) -> str:
    """``62 % in spin (busy.py:4), 30 % in step (train.py:9)``."""
    hot = [(h, h.get("samples", 0) / max(1, samples)) for h in thread.get("hottest") or []]
    told = [
        f"{100 * share:.0f} % in {clean_text(h.get('function', '?'))} ({_format_location(h)})"
        for h, share in hot[:3]
        if share >= _MIN_SHARE
    ]
    return ", ".join(told)


def _format_tree(roots: Sequence[Document], samples: int, paint: Paint) -> Iterator[str]:
    yield paint.dim(f"{'in all':>7} {'own':>5}")
    waiting = [(node, 0) for node in reversed(roots)]
    shown = hidden = 0
    while waiting:
        node, depth = waiting.pop()
        if node.get("samples", 0) < _MIN_SHARE * samples:
            continue
        if shown >= _MAX_TREE_LINES:
            hidden += 1
            continue
        shown += 1
        yield _format_node(node, depth, max(1, samples), paint)
        waiting += [(child, depth + 1) for child in reversed(node.get("children") or [])]
    if hidden:
        yield paint.dim(f"{'…':>7} {hidden} more: the files have all")


def _format_node(node: Document, depth: int, samples: int, paint: Paint) -> str:
    library = bool(node.get("library"))
    numbers = (
        f"{100 * node.get('samples', 0) / samples:5.0f} %"
        f" {_format_share(node.get('own', 0), samples):>5}"
    )
    name = (
        f"{'  ' * min(depth, 12)}{'  ' if library else '> '}{clean_text(node.get('function', '?'))}"
    )
    ends = node.get("ends") or {}
    if library and ends and ends.get("function") != node.get("function"):
        name += f" … {clean_text(ends['function'])}"
    place = _format_library_location(ends or node) if library else _format_lines(node)
    room = TERMINAL_COLUMNS - len(numbers) - 2
    name = truncate_end(name, room - min(len(place), _MIN_LOCATION_WIDTH) - 2)
    line = f"{numbers}  {name}  {truncate_start(place, room - len(name) - 2)}"
    return paint.dim(line) if library else paint.bold(line)


def _format_library_location(frame: Document) -> str:
    return _INSTALL_PREFIX.sub("", clean_text(frame.get("file", ""))) + (
        f":{clean_text(frame['line'])}" if frame.get("line") else ""
    )


def _format_share(own: int, samples: int) -> str:
    return f"{100 * own / samples:.0f} %" if own >= 0.005 * samples else ""


def _format_lines(node: Document) -> str:
    """``train.py:55`` or, where it stood in several lines, ``train.py:55 (61 %), :52``."""
    file, lines = clean_text(node.get("file", "")).rsplit("/", 1)[-1], node.get("lines") or []
    if not lines:
        return file
    total = max(1, int(node.get("samples", 1)))
    first, rest = lines[0], [line for line in lines[1:3] if line.get("samples", 0) >= 0.1 * total]
    told = f"{file}:{first.get('line')}" + (
        f" ({100 * first.get('samples', 0) / total:.0f} %)" if rest else ""
    )
    return told + "".join(f", :{line.get('line')}" for line in rest)


def _format_location(frame: Document) -> str:
    return f"{clean_text(frame.get('file', '?')).rsplit('/', 1)[-1]}:{clean_text(frame.get('line', '?'))}"
