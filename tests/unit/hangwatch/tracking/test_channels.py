"""The two ends of a point-to-point channel."""

from __future__ import annotations

from hangwatch.model.calls import StreamKind
from hangwatch.model.ranks import ExitInfo
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream
from tests.simulation.scripted_job import ScriptedJob


def get_attempt(job: ScriptedJob) -> Attempt:
    attempt = job.fleet.latest_attempt("job")
    assert attempt is not None
    return attempt


def get_channel(job: ScriptedJob, rank: int, kind: StreamKind, tag: int = 0) -> CallStream:
    streams = get_attempt(job).processes[rank].streams.values()
    return next(stream for stream in streams if stream.kind is kind and stream.tag == tag)


def make_job() -> ScriptedJob:
    job = ScriptedJob(2)
    job.make_p2p_call(0, StreamKind.SEND, 1)
    job.make_p2p_call(0, StreamKind.SEND, 1, tag=7)
    job.send_heartbeats()
    return job


def test_ends_of_a_channel_know_each_other() -> None:
    job = make_job()
    assert get_channel(job, 0, StreamKind.SEND).other_end is None, "the peer has not received yet"
    job.make_p2p_call(1, StreamKind.RECV, 0)
    job.send_heartbeats()
    sending, receiving = get_channel(job, 0, StreamKind.SEND), get_channel(job, 1, StreamKind.RECV)
    assert (sending.other_end, receiving.other_end) == (receiving, sending)
    assert get_channel(job, 0, StreamKind.SEND, tag=7).other_end is None, "another tag"


def test_receive_from_any_source_has_no_other_end() -> None:
    job = make_job()
    job.make_p2p_call(1, StreamKind.RECV, -1)
    job.send_heartbeats()
    assert get_channel(job, 1, StreamKind.RECV).other_end is None


def test_process_that_lost_its_rank_is_disconnected() -> None:
    job = make_job()
    job.make_p2p_call(1, StreamKind.RECV, 0)
    job.send_heartbeats()
    attempt = get_attempt(job)
    former = get_channel(job, 1, StreamKind.RECV)
    attempt.processes[1].exit = ExitInfo(exit_status=0)
    attempt.assign_rank(None, 1)
    assert former.other_end is None
    assert get_channel(job, 0, StreamKind.SEND).other_end is None
