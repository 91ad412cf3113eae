"""Where the threads of one process spent their time: stacks with the number of samples of each."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from hangwatch.model.ranks import RECORDER_THREAD_NAME, Frame, Frames, Place

from .frames import is_library

MAX_PROFILE_FRAMES = 400_000  # all stacks of a profile together, which take some megabytes
MAX_STACK_DEPTH = 400
# Two patterns, because a path may hold parentheses, and so may a C++ function.
_FRAME_PATTERNS = tuple(
    re.compile(rf"(?P<function>{function}) \((?P<file>{file})(?::(?P<line>\d+))?\)", re.DOTALL)
    for function, file in ((".*?", "/.*?"), (".*", ".*?"))
)
_THREAD_PATTERN = re.compile(r"thread \((?P<id>\w+)\)(?:: (?P<name>.*))?", re.DOTALL)

Item = TypeVar("Item")
# Frames from the outermost inwards, and the number of samples.
CountedStack = tuple[Frames, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadProfile:
    """The samples of one thread."""

    thread: str
    is_main: bool
    stacks: tuple[CountedStack, ...]

    @property
    def sample_count(self) -> int:
        return sum(count for _, count in self.stacks)

    @property
    def is_idle(self) -> bool:
        """Whether it was in one line of a library all the time, as in an idle pool."""
        innermost = {frames[-1] for frames, _ in self.stacks if frames}
        return len(innermost) <= 1 and all(is_library(frame.file) for frame in innermost)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The threads of a process, the main thread first. ``dropped_samples`` are those of the rarest
    stacks, for which there was no room.
    """

    threads: tuple[ThreadProfile, ...] = ()
    dropped_samples: int = 0

    @property
    def shown_threads(self) -> tuple[ThreadProfile, ...]:
        """The main thread, and those that did not only wait."""
        return tuple(t for t in self.threads if t.is_main or not t.is_idle)


def parse_pyspy_raw(lines: Iterable[str], pid: int) -> Profile:
    """Reads py-spy's raw format with thread names: ``thread (ID): NAME;FRAME;…;FRAME COUNT``. Raises
    ValueError for anything else.
    """
    samples: dict[tuple[str, str], Counter[Frames]] = {}

    @functools.cache
    def parse_frame(part: str) -> Frame | None:
        match = _FRAME_PATTERNS[0].fullmatch(part) or _FRAME_PATTERNS[1].fullmatch(part)
        return match and Frame(
            function=match["function"], file=match["file"], line=int(match["line"] or 0)
        )

    for line in lines:
        path, _, count = line.rpartition(" ")
        name, *parts = path.split(";")
        while parts and parse_frame(parts[0]) is None:  # the thread's name has a semicolon
            name += f";{parts.pop(0)}"
        frames = tuple(filter(None, map(parse_frame, parts[:MAX_STACK_DEPTH])))
        match = _THREAD_PATTERN.fullmatch(name)
        if match is None or not count.isdecimal():
            raise ValueError(f"not a line of samples: {line[:100]!r}")
        stacks = samples.setdefault((match["id"], match["name"] or ""), Counter())
        stacks[frames] += int(count)
    threads = []
    for (thread_id, name), stacks in samples.items():
        if name == RECORDER_THREAD_NAME:  # This thread is not part of the job.
            continue
        is_first = thread_id == str(pid)
        if not name:
            name = "MainThread" if is_first else f"thread {thread_id}"
        thread = ThreadProfile(
            thread=name,
            is_main=is_first or name == "MainThread",
            stacks=tuple(stacks.most_common()),
        )
        threads.append(thread)
    threads.sort(key=lambda thread: (not thread.is_main, thread.thread))
    # The rarest stacks are dropped if all of them have too many frames.
    remaining_frames = MAX_PROFILE_FRAMES
    dropped_samples = 0
    limited = []
    for thread in threads:
        kept = []
        for frames, sample_count in thread.stacks:  # The most frequent stack is first.
            remaining_frames -= len(frames)
            if remaining_frames < 0:
                dropped_samples += sample_count
            else:
                kept.append((frames, sample_count))
        limited.append(replace(thread, stacks=tuple(kept)))
    return Profile(threads=tuple(limited), dropped_samples=dropped_samples)


def index_items(table: dict[Item, int], items: Iterable[Item]) -> list[int]:
    """The indices of the items in a table of distinct ones; adds those that are new."""
    return [table.setdefault(item, len(table)) for item in items]


def pack_profile(profile: Profile) -> str:
    """The profile as one string of JSON. The fields of a heartbeat are validated one by one, and
    these would be a million.
    """
    table: dict[Frame, int] = {}
    threads = []
    for thread in profile.threads:
        stacks = [[index_items(table, frames), count] for frames, count in thread.stacks]
        threads.append({"thread": thread.thread, "main": thread.is_main, "stacks": stacks})
    document = {
        "frames": [frame.place for frame in table],
        "threads": threads,
        "dropped": profile.dropped_samples,
    }
    return json.dumps(document, separators=(",", ":"))


def unpack_profile(text: str) -> Profile:
    """The inverse of `pack_profile`. Raises ValueError for anything else."""
    try:
        document = json.loads(text)
        frames = [
            Frame(function=str(function), file=str(file), line=int(line))
            for function, file, line in document["frames"]
        ]
        threads = []
        for thread in document["threads"]:
            stacks = []
            for indices, count in thread["stacks"]:
                if any(index < 0 for index in indices):
                    raise ValueError("a frame has a negative index")
                stack = tuple(frames[index] for index in indices)
                stacks.append((stack, max(0, int(count))))
            threads.append(
                ThreadProfile(
                    thread=str(thread["thread"]), is_main=bool(thread["main"]), stacks=tuple(stacks)
                )
            )
        return Profile(threads=tuple(threads), dropped_samples=int(document["dropped"]))
    except (KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a profile: {error!r}") from error


def make_speedscope_document(
    name: str,
    profiles: Iterable[tuple[str, Sequence[tuple[Sequence[Frame], int]]]],
    unit: str,
    rate: int,
) -> dict[str, object]:
    """A file for speedscope. Each profile has a name, and stacks with their numbers of samples, of
    which ``rate`` make a ``unit``; the outermost frame of a stack comes first.

    Format: https://www.speedscope.app/file-format-schema.json
    """
    table: dict[Place, int] = {}
    documents = []
    for label, stacks in profiles:
        samples = []
        for frames, _ in stacks:
            samples.append(index_items(table, [frame.place for frame in frames]))
        document = {
            "type": "sampled",
            "name": label,
            "unit": unit,
            "startValue": 0,
            "endValue": sum(count for _, count in stacks) / rate,
            "samples": samples,
            "weights": [count / rate for _, count in stacks],
        }
        documents.append(document)
    shared_frames: list[dict[str, object]] = []
    for function, file, line in table:
        shared_frames.append({"name": function, "file": file})
        if line:
            shared_frames[-1]["line"] = line
    return {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "name": name,
        "exporter": "hangwatch",
        "shared": {"frames": shared_frames},
        "profiles": documents,
    }
