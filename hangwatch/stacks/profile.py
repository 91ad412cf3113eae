"""Where the threads of one process spent their time: stacks with how often each was seen. Pure."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hangwatch.model.threads import Frame

from .frames import is_library

MAX_PROFILE_FRAMES = 400_000  # of all stacks of a profile together: some megabytes
MAX_STACK_DEPTH = 400
# A path may hold parentheses, and so may a C++ function.
_FRAME_PATTERNS = tuple(
    re.compile(rf"(?P<function>{function}) \((?P<file>{file})(?::(?P<line>\d+))?\)", re.DOTALL)
    for function, file in ((".*?", "/.*?"), (".*", ".*?"))
)
_THREAD_PATTERN = re.compile(r"thread \((?P<id>\w+)\)(?:: (?P<name>.*))?", re.DOTALL)
_OWN_THREADS = (
    "hangwatch",
)  # the recorder's own thread in the training process: no part of the job


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadProfile:
    """One thread: stacks, outermost frame first, and the number of samples of each."""

    thread: str
    is_main: bool
    stacks: tuple[tuple[tuple[Frame, ...], int], ...]

    @property
    def sample_count(self) -> int:
        return sum(count for _, count in self.stacks)

    @property
    def is_idle(self) -> bool:
        """It stood in one and the same line of a library all the time: a pool's worker, a thread
        that waits.
        """
        innermost = {frames[-1] for frames, _ in self.stacks if frames}
        return len(innermost) <= 1 and all(is_library(frame.file) for frame in innermost)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The main thread comes first. ``dropped`` samples were of stacks so rare that there was no
    room for them.
    """

    threads: tuple[ThreadProfile, ...] = ()
    dropped_samples: int = 0

    @property
    def shown_threads(self) -> tuple[ThreadProfile, ...]:
        """The main thread, and those that did more than wait."""
        return tuple(t for t in self.threads if t.is_main or not t.is_idle)


def parse_pyspy_raw(lines: Iterable[str], pid: int) -> Profile:
    """From py-spy's raw format with thread names: ``thread (ID): NAME;FRAME;…;FRAME COUNT``. Raises
    ValueError for anything else.
    """
    found: dict[tuple[str, str], Counter[tuple[Frame, ...]]] = {}
    interned: dict[str, Frame | None] = {}
    for line in lines:
        path, _, count = line.rpartition(" ")
        parts = path.split(";")
        name, start = parts[0], 1
        while (
            start < len(parts) and _parse_frame(parts[start], interned) is None
        ):  # the name has a semicolon in it
            name, start = f"{name};{parts[start]}", start + 1
        match = _THREAD_PATTERN.fullmatch(name)
        frames = tuple(
            frame
            for part in parts[start:][:MAX_STACK_DEPTH]
            if (frame := _parse_frame(part, interned)) is not None
        )
        if match is None or not count.isdecimal():
            raise ValueError(f"not a line of samples: {line[:100]!r}")
        found.setdefault((match["id"], match["name"] or ""), Counter())[frames] += int(count)
    threads = [
        ThreadProfile(
            thread=name or ("MainThread" if number == str(pid) else f"thread {number}"),
            is_main=number == str(pid) or name == "MainThread",
            stacks=tuple(stacks.most_common()),
        )
        for (number, name), stacks in found.items()
        if name not in _OWN_THREADS
    ]
    return _limit_frames(sorted(threads, key=lambda t: (not t.is_main, t.thread)))


def _parse_frame(part: str, interned: dict[str, Frame | None]) -> Frame | None:
    if part not in interned:
        match = _FRAME_PATTERNS[0].fullmatch(part) or _FRAME_PATTERNS[1].fullmatch(part)
        interned[part] = match and Frame(
            function=match["function"], file=match["file"], line=int(match["line"] or 0)
        )
    return interned[part]


def _limit_frames(threads: Sequence[ThreadProfile]) -> Profile:
    room, dropped, kept = MAX_PROFILE_FRAMES, 0, []
    for thread in threads:
        stacks = []
        for frames, count in thread.stacks:  # the most frequent first
            room -= len(frames)
            if room < 0:
                dropped += count
            else:
                stacks.append((frames, count))
        kept.append(
            ThreadProfile(thread=thread.thread, is_main=thread.is_main, stacks=tuple(stacks))
        )
    return Profile(threads=tuple(kept), dropped_samples=dropped)


def pack_profile(profile: Profile) -> str:
    """As one string of JSON: a heartbeat's fields are looked at one by one, and these would be a
    million.
    """
    numbers: dict[Frame, int] = {}
    threads = [
        {
            "thread": thread.thread,
            "main": thread.is_main,
            "stacks": [
                [[numbers.setdefault(frame, len(numbers)) for frame in frames], count]
                for frames, count in thread.stacks
            ],
        }
        for thread in profile.threads
    ]
    frames = [[frame.function, frame.file, frame.line] for frame in numbers]
    return json.dumps(
        {"frames": frames, "threads": threads, "dropped": profile.dropped_samples},
        separators=(",", ":"),
    )


def unpack_profile(text: str) -> Profile:
    """The inverse of `pack`. Raises ValueError for anything else."""
    try:
        told = json.loads(text)
        frames = [
            Frame(function=str(function), file=str(file), line=int(line))
            for function, file, line in told["frames"]
        ]
        if any(n < 0 for thread in told["threads"] for stack, _ in thread["stacks"] for n in stack):
            raise ValueError("a frame has a number below 0")
        threads = tuple(
            ThreadProfile(
                thread=str(thread["thread"]),
                is_main=bool(thread["main"]),
                stacks=tuple(
                    (tuple(frames[n] for n in stack), max(0, int(count)))
                    for stack, count in thread["stacks"]
                ),
            )
            for thread in told["threads"]
        )
        return Profile(threads=threads, dropped_samples=int(told["dropped"]))
    except (KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a profile: {error!r}") from error


def profiles_to_speedscope(
    name: str, profiles: Iterable[tuple[str, Profile]], rate_hz: int
) -> dict[str, object]:
    """A profile for each thread of each of the named ``profiles``; a stack's samples stand
    together, since their order is not kept.

    Format: https://www.speedscope.app/file-format-schema.json
    """
    numbers: dict[Frame, int] = {}
    made = []
    for label, profile in profiles:
        for thread in profile.threads:
            samples = [
                [numbers.setdefault(frame, len(numbers)) for frame in frames]
                for frames, _ in thread.stacks
            ]
            made.append(
                {
                    "type": "sampled",
                    "name": f"{label}, {thread.thread}",
                    "unit": "seconds",
                    "startValue": 0,
                    "endValue": thread.sample_count / rate_hz,
                    "samples": samples,
                    "weights": [count / rate_hz for _, count in thread.stacks],
                }
            )
    return {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "name": name,
        "exporter": "hangwatch",
        "shared": {
            "frames": [
                {"name": f.function, "file": f.file} | ({"line": f.line} if f.line else {})
                for f in numbers
            ]
        },
        "profiles": made,
    }
