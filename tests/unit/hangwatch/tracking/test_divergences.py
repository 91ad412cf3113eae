"""Members whose running hashes differ, where a process is replaced or a call is retracted."""

from __future__ import annotations

import pytest

from hangwatch.model.calls import StreamKind
from hangwatch.protocol import heartbeat
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import GroupState
from hangwatch.tracking.fleet import Fleet

GROUP = heartbeat.StreamIdentity(kind=StreamKind.COLLECTIVE, name="dp", desc="dp", ranks="0-3")


class ReportedMembers:
    """Four ranks with one group, each on a host of its own."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.number = 0

    def report(
        self,
        rank: int,
        seq: int,
        chain: int,
        *,
        start_ticks: int = 1,
        retractions: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """The process that began at ``start_ticks`` has made call ``seq``, with this running hash."""
        self.number += 1
        identity = heartbeat.ProcessIdentity(
            job="j", rank=rank, world_size=4, pid=7, start_ticks=start_ticks
        )
        stream = heartbeat.StreamUpdate(
            uid=1, identity=GROUP, entered=seq, completed=seq, chain=chain
        )
        update = heartbeat.ProcessUpdate(
            key=f"7-{start_ticks}",
            identity=identity,
            lifecycle=3,
            streams=(stream,),
            retractions=retractions,
        )
        self.fleet.apply_heartbeat(
            heartbeat.Heartbeat(
                host=f"n{rank}", agent=f"a{rank}", number=self.number, processes=(update,)
            ),
            100.0 + self.number,
        )

    @property
    def attempt(self) -> Attempt:
        (attempt,) = self.fleet.attempts.values()
        return attempt

    @property
    def group_state(self) -> GroupState:
        state = self.attempt.processes[0].streams[1].group_state
        assert state is not None
        return state


@pytest.fixture
def job() -> ReportedMembers:
    """All ranks have made call 1, and ranks 0 to 2 have made call 2."""
    job = ReportedMembers()
    for rank in range(4):
        job.report(rank, 1, 11)
    for rank in range(3):
        job.report(rank, 2, 12)
    return job


def test_divergence_ends_with_the_process_that_differed(job: ReportedMembers) -> None:
    job.report(3, 2, 99)
    assert job.attempt.diverged_groups == {job.group_state.key}
    assert job.group_state.register_side(job.attempt.processes[3].streams[1], 107.0)
    job.report(3, 1, 11, start_ticks=2)
    assert not job.attempt.diverged_groups
    assert not job.group_state.diverged
    assert not job.group_state.streams_by_side
    job.report(3, 2, 12, start_ticks=2)
    assert not job.attempt.diverged_groups


def test_divergence_of_others_outlasts_the_process(job: ReportedMembers) -> None:
    job.report(2, 3, 13)
    job.report(1, 3, 98)
    job.report(3, 1, 11, start_ticks=2)
    assert job.attempt.diverged_groups


def test_successor_is_compared_with_calls_that_others_made_before(job: ReportedMembers) -> None:
    job.report(3, 2, 12)
    job.report(3, 1, 11, start_ticks=2)
    job.report(3, 2, 99, start_ticks=2)
    assert job.attempt.diverged_groups


def test_successor_is_not_compared_with_the_former_process(job: ReportedMembers) -> None:
    job.report(3, 9, 99)
    job.report(3, 1, 11, start_ticks=2)
    job.report(0, 9, 19)
    assert job.group_state.reference_hashes == {1: 11, 9: 19}
    assert not job.attempt.diverged_groups


def test_call_that_replaces_a_retracted_one_is_compared(job: ReportedMembers) -> None:
    job.report(3, 2, 12)
    job.report(3, 2, 99, retractions=((1, 2),))
    assert job.attempt.diverged_groups
