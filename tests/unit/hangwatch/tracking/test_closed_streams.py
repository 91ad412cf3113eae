"""Streams whose groups are gone: the server forgets them once no rank can wait in them."""

from __future__ import annotations

from hangwatch.model.calls import LossReason, StreamKind
from hangwatch.protocol import heartbeat
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.fleet import Fleet


class ReportedJob:
    """Ranks of one host, whose updates are applied one by one."""

    def __init__(self, world_size: int) -> None:
        self.fleet = Fleet()
        self.world_size = world_size
        self.number = 0
        for rank in range(world_size):
            self.report(rank)

    def report(self, rank: int, lifecycle: int = 3, start_ticks: int = 1, **fields: object) -> None:
        self.number += 1
        identity = heartbeat.ProcessIdentity(
            job="j", rank=rank, world_size=self.world_size, pid=rank + 1, start_ticks=start_ticks
        )
        update = heartbeat.ProcessUpdate(
            key=f"{rank + 1}-{start_ticks}",
            identity=identity,
            lifecycle=lifecycle,
            **fields,  # type: ignore[arg-type]
        )
        beat = heartbeat.Heartbeat(host="n", agent="a", number=self.number, processes=(update,))
        assert self.fleet.apply_heartbeat(beat, 100.0)

    @property
    def attempt(self) -> Attempt:
        (attempt,) = self.fleet.attempts.values()
        return attempt


def make_collective(uid: int, name: str, entered: int = 1) -> heartbeat.StreamUpdate:
    identity = heartbeat.StreamIdentity(
        kind=StreamKind.COLLECTIVE, name=name, desc=name, ranks="0-1"
    )
    return heartbeat.StreamUpdate(uid=uid, entered=entered, chain=7, identity=identity)


def make_channel(uid: int, kind: StreamKind, peer: int, tag: int) -> heartbeat.StreamUpdate:
    identity = heartbeat.StreamIdentity(
        kind=kind, name="0", desc="0", ranks="0-1", peer=peer, tag=tag
    )
    return heartbeat.StreamUpdate(uid=uid, entered=1, identity=identity)


def test_group_is_forgotten_with_its_last_member() -> None:
    job = ReportedJob(2)
    for number in range(50):
        for rank in (0, 1):
            job.report(rank, streams=(make_collective(number + 1, f"{number}"),))
    assert len(job.attempt.streams_by_group) == 50
    members_before = job.attempt.count_members()
    job.report(0, closed=tuple(range(1, 41)))
    assert len(job.attempt.processes[0].streams) == 10
    assert len(job.attempt.streams_by_group) == 50  # rank 1 may still wait in them
    job.report(1, closed=tuple(range(1, 41)))
    assert len(job.attempt.streams_by_group) == 10
    assert job.attempt.count_members() == members_before, "10 groups still have these members"
    for rank in (0, 1):
        job.report(rank, closed=tuple(range(41, 51)))
    assert job.attempt.count_members() == members_before - 2


def test_count_of_a_closed_stream_remains_known_to_its_group() -> None:
    job = ReportedJob(2)
    job.report(0, streams=(make_collective(1, "g", entered=3),), opened=1)
    job.report(0, closed=(1,), opened=1)
    job.report(1, streams=(make_collective(1, "g", entered=3),))
    ((state, *_),) = [list(members.values()) for members in job.attempt.streams_by_group.values()]
    assert (state.entered, state.is_closed) == (3, True)
    assert not job.attempt.incomplete_ranks


def test_groups_that_not_all_members_reported_are_forgotten_in_the_end() -> None:
    job = ReportedJob(2)
    for number in range(1500):
        job.report(0, streams=(make_collective(number + 1, f"{number}"),))
        job.report(0, closed=(number + 1,))
    assert len(job.attempt.streams_by_group) <= 1025


def test_channel_finds_its_other_end_among_thousands() -> None:
    job = ReportedJob(2)
    sends = tuple(make_channel(t + 1, StreamKind.SEND, 1, t) for t in range(2000))
    receives = tuple(make_channel(t + 1, StreamKind.RECV, 0, t) for t in range(2000))
    job.report(0, streams=sends)
    job.report(1, streams=receives)
    streams = job.attempt.processes[0].streams
    assert all(s.other_end is not None and s.other_end.tag == s.tag for s in streams.values())
    job.report(0, closed=(5,))
    job.report(0, streams=(make_channel(5000, StreamKind.SEND, 1, 4),))
    reopened = job.attempt.processes[0].streams[5000].other_end
    assert reopened is not None
    assert reopened.tag == 4


def test_ring_that_cannot_be_read_makes_all_streams_uncertain() -> None:
    job = ReportedJob(2)
    job.report(0, streams=(make_collective(1, "g", entered=3),))
    assert not job.attempt.lossy_ranks
    job.report(0, lifecycle=0, faults=("ring 1-1.ring cannot be read: truncated",))
    stream = job.attempt.processes[0].streams[1]
    assert stream.loss is not None
    assert (stream.loss.from_seq, stream.loss.reason) == (4, LossReason.UNREADABLE)
    assert job.attempt.lossy_ranks == {0}
    assert job.attempt.incomplete_ranks == {0}


def test_streams_that_were_never_reported_are_counted() -> None:
    job = ReportedJob(2)
    job.report(0, streams=(make_collective(3, "g"),), opened=3)
    assert job.attempt.incomplete_ranks == {0}
    job.report(0, streams=(make_collective(1, "a"), make_collective(2, "b")), opened=3)
    assert not job.attempt.incomplete_ranks


def test_former_process_does_not_complete_its_successor() -> None:
    job = ReportedJob(2)
    job.report(0, streams=(make_collective(1, "g"),), opened=1)
    job.report(0, start_ticks=2, streams=(make_collective(1, "g"),), opened=2)
    assert job.attempt.incomplete_ranks == {0}
    job.report(0, start_ticks=1, opened=1)
    assert job.attempt.incomplete_ranks == {0}
