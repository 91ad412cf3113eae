"""Whether a rank that others wait for still moves: from two looks at its stack, and its use of the CPU."""

from __future__ import annotations

from hangwatch.state import Process, Sample

APART = 0.8  # seconds between two looks that count as two
BUSY = 2.0  # seconds since the main thread last used the CPU; a look at its stack may stop it for one of them


def looks(process: Process, since: float) -> list[Sample]:
    """The stacks taken since a wait began."""
    return [s for s in process.samples if s.taken_at >= since and s.threads]


def looked_twice(process: Process, since: float) -> bool:
    taken = looks(process, since)
    return len(taken) >= 2 and taken[-1].taken_at - taken[0].taken_at >= APART


def moves(process: Process, since: float) -> bool:
    """It works: its main thread uses the CPU, or is in other functions at one look than at the other."""
    return busy(process) or stack_moves(process, since)


def busy(process: Process) -> bool:
    return process.told_at - process.idle_at < BUSY


def stack_moves(process: Process, since: float) -> bool:
    shapes = {
        tuple((f.file, f.function) for f in s.main.frames if ".py" in f.file or f.file.startswith("<"))
        for s in looks(process, since)
        if s.main is not None
    }
    return len(shapes) > 1
