"""What a thread is doing, by its stack: what it waits for, and in what larger operation it is."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hangwatch.model.threads import Frame, ThreadStack

from .activity_kinds import Activity, ActivityKind
from .frames import is_torch_frame, is_user_frame, waits_for_work
from .place_kinds import INSIDE_TABLE
from .wait_kinds import STORE_KEY, TEXT_TABLE, WAIT_TABLE

_PatternRow = tuple[re.Pattern[str], re.Pattern[str], ActivityKind]


def _compile_rows(table: list[tuple[str, str, ActivityKind]]) -> list[_PatternRow]:
    return [(re.compile(file), re.compile(function), kind) for file, function, kind in table]


_WAIT_ROWS = _compile_rows(WAIT_TABLE)
_INSIDE_ROWS = _compile_rows(INSIDE_TABLE)
_TEXT_ROWS = [(re.compile(pattern, re.IGNORECASE), kind) for pattern, kind in TEXT_TABLE]


def classify_activity(stack: ThreadStack | None) -> Activity:
    """What a thread does; an empty `Activity` if its stack shows nothing that is known here."""
    if stack is None or not stack.frames:
        return Activity()
    waits = _find_wait_in_libraries(stack.frames)
    if waits is None and not stack.active:
        waits = _find_wait_in_text(stack.frames[0].text or "")
    return Activity(waits=waits, inside=_find_place(stack.frames))


def _find_wait_in_libraries(frames: Sequence[Frame]) -> ActivityKind | None:
    """The wait that the outermost of the library frames below the user's code shows."""
    library_frames: list[Frame] = []
    for frame in frames:
        if is_user_frame(frame):
            break
        library_frames.append(frame)
    for frame in reversed(library_frames):
        waits = _match_rows(_WAIT_ROWS, frame)
        if waits is not None:
            return waits
    return None


def _find_wait_in_text(text: str) -> ActivityKind | None:
    """The wait that the innermost source line shows."""
    for pattern, kind in _TEXT_ROWS:
        if pattern.search(text):
            return kind
    return None


def _find_place(frames: Sequence[Frame]) -> ActivityKind | None:
    for frame in frames:
        place = _match_place(frame)
        if place is not None:
            return place
    return None


def waits_for_external(stack: ThreadStack | None) -> bool:
    """Whether a thread certainly waits for something that neither another thread of its process nor
    a call of another rank provides.
    """
    waits = classify_activity(stack).waits
    if stack is None or waits is None:
        return False
    innermost = stack.frames[0]
    if is_torch_frame(innermost) or innermost.polls is not None:
        return False
    return waits.is_external and (waits is STORE_KEY or not waits_for_work(stack))


def _match_place(frame: Frame) -> ActivityKind | None:
    if frame.handler is not None:
        advice = "Look at the exception first, then at what its handler waits for."
        return ActivityKind(phrase=f"in an exception handler ({frame.handler})", advice=advice)
    return _match_rows(_INSIDE_ROWS, frame)


def _match_rows(rows: list[_PatternRow], frame: Frame) -> ActivityKind | None:
    name = frame.function.rpartition(".")[2]
    for file, function, kind in rows:
        if function.fullmatch(name) and file.search(frame.file):
            return kind
    return None
