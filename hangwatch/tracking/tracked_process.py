"""A process with the attempt that it belongs to, and how urgent its next report is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hangwatch.model.limits import STOPPED_STATES

from .attempt import Attempt
from .call_stream import MAX_URGENT_SUSPECTS, CallStream, DivergenceBounds
from .process import IDLE_AFTER_S, Process


@dataclass(frozen=True, slots=True)
class TrackedProcess:
    """A process with its attempt, which stays the same for as long as the process is tracked."""

    process: Process
    attempt: Attempt

    @property
    def holds_rank(self) -> bool:
        """Whether no later process has taken over its rank."""
        return self.attempt.processes.get(self.process.rank) is self.process

    @property
    def is_suspect(self) -> bool:
        return self.process.rank in self.attempt.suspects

    @property
    def has_mutual_wait(self) -> bool:
        """Whether it has an unfinished call with a suspected peer that waits for it."""
        return any(
            stream.peer is not None and self.attempt.waits_on(stream.peer, self.process.rank)
            for stream in self.process.open_calls.unfinished_streams
        )

    @property
    def is_urgent(self) -> bool:
        """Whether its next report may decide a diagnosis.

        True if it is stopped (py-spy may have stopped it); if it is one of the first suspects or of
        the last ranks that are not suspected; if it and another rank wait for each other; or if it
        is a member of a small group that diverged.
        """
        process, attempt = self.process, self.attempt
        if not attempt.suspects and not attempt.diverged_groups:
            return False
        if self.is_suspect:
            is_stopped = process.activity.state in STOPPED_STATES
            if is_stopped or len(attempt.suspects) <= MAX_URGENT_SUSPECTS or self.has_mutual_wait:
                return True
        elif 2 * len(attempt.suspects) > len(attempt.processes):
            return True
        return bool(attempt.diverged_groups) and any(
            stream.group_state is not None and stream.group_state.is_urgent
            for stream in process.streams.values()
        )

    @property
    def needs_wait_sample(self) -> bool:
        """Whether it seems to wait for a rank that waits for it, and has no stack sample since its
        last call that could confirm it.
        """
        process = self.process
        idle_s = process.reports.updated_at - process.activity.last_active_at
        if not self.is_suspect or idle_s < IDLE_AFTER_S or not self.has_mutual_wait:
            return False
        last_advanced_at = process.last_advanced_at
        return all(sample.taken_at < last_advanced_at for sample in process.samples)

    def iter_new_sides(self) -> Iterator[tuple[CallStream, DivergenceBounds]]:
        """Its streams whose calls should be requested after a recent divergence, and where that is.
        Each stream stands for its side of the divergence, and is returned once.
        """
        if not self.attempt.diverged_groups:
            return
        for stream in self.process.streams.values():
            state = stream.group_state
            if state is None or state.divergence is None:
                continue
            if state.register_side(stream, self.attempt.last_seen_at):
                yield stream, state.divergence
