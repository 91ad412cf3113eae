"""Checks what the recorders of the jobs on this host did not record."""

from __future__ import annotations

import time
from collections.abc import Iterator

from hangwatch.ring.layout import RingError
from hangwatch.ring.snapshot import RingSnapshot

from ...environment import run_dir
from ...node.discovery.rings import RingFile, find_ring_files
from .findings import Finding


def check_recordings(url: str) -> Iterator[Finding]:
    """One finding for each live rank of this host whose calls are not completely recorded."""
    folder = run_dir.find_run_dir(url)
    if folder is None:  # no job has run here
        return
    try:
        run_dir.check_owner(folder)
        files, _ = find_ring_files(folder)
    except OSError:  # `activation.check_run_dir` reports it
        return
    for file in files:
        try:
            if run_dir.read_start_ticks(file.pid) == file.start_ticks:
                yield from check_ring(file)
        except (OSError, ValueError, RingError):  # its process has exited, or is just starting
            continue


def check_ring(file: RingFile) -> Iterator[Finding]:
    """Raises OSError or RingError if the ring cannot be read."""
    _, reader = file.open_reader()
    snapshot = file.read_snapshot(reader, time.monotonic_ns())
    problems = list(_iter_problems(snapshot))
    if problems:
        rank = f"rank {snapshot.identity.get('rank')} of {snapshot.identity.get('job')}"
        faults = f" ({'; '.join(snapshot.faults)})" if snapshot.faults else ""
        yield Finding(
            name="recording",
            ok=None,
            detail=f"{rank}, pid {snapshot.pid}: {'; '.join(problems)}{faults}",
            remedy="nothing is concluded by counting these calls; stacks and exits still are",
        )


def _iter_problems(snapshot: RingSnapshot) -> Iterator[str]:
    lossy = [stream for stream in snapshot.streams if stream.loss is not None]
    if lossy:
        first = lossy[0]
        assert first.loss is not None
        more = f" and {len(lossy) - 1} more" if len(lossy) > 1 else ""
        yield (
            f"calls of group {first.group.desc}{more} are not completely recorded since call"
            f" {first.loss.from_seq}"
        )
    if snapshot.dropped:
        yield f"{snapshot.dropped} calls, groups or channels are not recorded"
