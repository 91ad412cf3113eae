"""Stacks as terminal text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hangwatch.stacks.frames import is_library

from .sites import Document, format_site
from .text import (
    PLAIN_PAINT,
    TERMINAL_COLUMNS,
    Paint,
    clean_text,
    name_ranks,
    truncate_end,
    truncate_start,
    wrap_text,
)

_FUNCTION_WIDTH = 26  # columns for a function's name
_MAX_LIBRARY_RUN = 3  # longer runs of library frames are folded


def format_stacks(
    document: Document, paint: Paint = PLAIN_PAINT, full: bool = False
) -> Iterator[str]:
    """The stacks in the document's order (culprits first), with the innermost frame on top; failed
    samples with their remedy.
    """
    culprits = set(document.get("culprits") or [])
    entries = document.get("stacks") or []
    shown = [entry for entry in entries if full or not _is_library_thread(entry)]
    for i, entry in enumerate(shown):
        if i:
            yield ""
        role = ""
        if culprits:
            is_culprit = not culprits.isdisjoint(entry.get("ranks") or [])
            role = "culprit" if is_culprit else "waiting"
        yield from format_stack(entry, paint, role=role, full=full)
    omitted = len(entries) - len(shown)
    if omitted:
        yield paint.dim(f"… and {omitted} more in libraries only: see `hangwatch show --full`")


def _is_library_thread(entry: Document) -> bool:
    """Whether it is a thread other than the main one without user code, such as a pool's."""
    if entry.get("error") or entry.get("thread") in (None, "MainThread"):
        return False
    files = [str(frame.get("file", "")) for frame in entry.get("frames") or []]
    return bool(files) and all(map(is_library, files))


def format_stack(
    entry: Document, paint: Paint = PLAIN_PAINT, role: str = "", full: bool = False
) -> Iterator[str]:
    """One stack. User frames are bold and marked with ``>``; library frames are dim and, unless
    ``full``, folded.
    """
    parts = [
        paint.bold(name_ranks(entry.get("ranks") or [])),
        role,
        clean_text(entry.get("thread") or ""),
        clean_text(entry.get("source") or ""),
    ]
    yield " · ".join(part for part in parts if part)
    if entry.get("error"):
        for line in wrap_text(entry["error"], indent="  ! "):
            yield paint.as_warning(line)
    for run in _split_frame_runs(entry.get("frames") or []):
        if _is_library_frame(run[0]):
            yield from _format_library_run(run, paint, full)
        else:
            yield from _format_user_run(run, paint)


def _is_library_frame(frame: Document) -> bool:
    return is_library(str(frame.get("file", "")))


def _format_library_run(run: list[Document], paint: Paint, full: bool) -> Iterator[str]:
    shown = run if full or len(run) <= _MAX_LIBRARY_RUN else run[:1]
    for frame in shown:
        yield paint.dim(_format_frame(frame, "  "))
    omitted = len(run) - len(shown)
    if omitted:
        yield paint.dim(f"    … {omitted} more frames of libraries")


def _format_user_run(run: list[Document], paint: Paint) -> Iterator[str]:
    for frame in run:
        yield paint.bold(_format_frame(frame, "> "))
        if frame.get("text"):
            yield truncate_end(f"      {clean_text(frame['text']).strip()}", TERMINAL_COLUMNS)


def merge_equal_stacks(entries: Iterable[Document]) -> list[dict[str, Any]]:
    """Merges equal stacks of several ranks into one entry with all their ranks, in the order of
    their first appearance.
    """
    merged: dict[tuple[object, ...], dict[str, Any]] = {}
    for entry in entries:
        frames = tuple(
            (f.get("function"), f.get("file"), f.get("line")) for f in entry.get("frames") or []
        )
        key = (entry.get("thread"), entry.get("source"), entry.get("error"), frames)
        ranks = list(entry.get("ranks") or [])
        if key in merged:
            merged[key]["ranks"] = sorted({*merged[key]["ranks"], *ranks})
        else:
            merged[key] = {**entry, "ranks": ranks}
    return list(merged.values())


def _split_frame_runs(frames: Sequence[Document]) -> Iterator[list[Document]]:
    """Runs of consecutive frames that are all of libraries or all of the user's code."""
    run: list[Document] = []
    for frame in frames:
        if run and _is_library_frame(run[0]) != _is_library_frame(frame):
            yield run
            run = []
        run.append(frame)
    if run:
        yield run


def _format_frame(frame: Document, mark: str) -> str:
    function = truncate_end(clean_text(frame.get("function", "?")), _FUNCTION_WIDTH)
    location_width = TERMINAL_COLUMNS - _FUNCTION_WIDTH - 6
    location = truncate_start(format_site(frame, with_function=False), location_width)
    return f"  {mark}{function:{_FUNCTION_WIDTH}}  {location}"
