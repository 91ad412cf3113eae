"""The running hashes of the two ends of a channel."""

from __future__ import annotations

from hangwatch.model.calls import Signature, StreamKind, with_agreement_hash
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.operators import MustMatch
from hangwatch.protocol.heartbeat import CallsReply
from tests.simulation.scripted_job import ScriptedJob

SEND, RECV = StreamKind.SEND, StreamKind.RECV
_COMPARED = MustMatch.DTYPE | MustMatch.SHAPE


def exchange(job: ScriptedJob, count: int, *, sent: int = 64) -> None:
    for _ in range(count):
        job.make_p2p_call(0, SEND, 1, done=True, shape=(sent,))
        job.make_p2p_call(1, RECV, 0, done=True, shape=(64,))


def test_both_ends_of_a_message_have_one_hash() -> None:
    ends = [
        with_agreement_hash(Signature(op=op, dtype="float32"), _COMPARED, (1, 64)).agree
        for op in ("send", "recv", "recv_any_source")
    ]
    other = with_agreement_hash(Signature(op="recv", dtype="float32"), _COMPARED, (1, 48)).agree
    assert len(set(ends)) == 1
    assert other not in ends


def test_short_message_among_thousands_of_quick_ones_is_found() -> None:
    job = ScriptedJob(2)
    exchange(job, 700)
    job.send_heartbeats()
    assert job.list_due_verdicts() == []
    exchange(job, 800)
    exchange(job, 1, sent=48)
    exchange(job, 1500)
    job.send_heartbeats()
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.differing_fields, verdict.seq) == (
        VerdictKind.MISMATCH,
        (0, 1),
        ("shape",),
        1501,
    )


def test_equal_hashes_are_dropped() -> None:
    job = ScriptedJob(2)
    for _ in range(50):
        exchange(job, 30)
        job.send_heartbeats()
    processes = job.latest_attempt.processes
    streams = [stream for rank in (0, 1) for stream in processes[rank].streams.values()]
    assert all(len(stream.reported_hashes) <= 1 for stream in streams)
    assert not job.latest_attempt.diverged_channels


def test_ends_that_are_at_different_calls_agree() -> None:
    job = ScriptedJob(2)
    exchange(job, 100)
    for _ in range(7):
        job.make_p2p_call(0, SEND, 1, shape=(64,))
        job.send_heartbeats()
    assert job.list_due_verdicts() == []
    assert not job.latest_attempt.diverged_channels


def test_messages_with_receives_from_any_source_are_not_compared() -> None:
    job = ScriptedJob(2)
    job.make_p2p_call(0, SEND, 1, done=True, shape=(16,))
    job.make_p2p_call(1, RECV, -1, done=True, shape=(16,))
    exchange(job, 30)
    job.send_heartbeats()
    assert job.list_due_verdicts() == []


def test_lost_records_leave_bounds() -> None:
    job = ScriptedJob(2)
    exchange(job, 64)
    job.send_heartbeats()
    exchange(job, 36)
    exchange(job, 1, sent=48)
    exchange(job, 99)
    job.send_heartbeats()
    for request in job.run_diagnosis().requests:
        reply = CallsReply(
            key=f"{request.rank}-1", request="c", uid=request.stream_uid, from_seq=request.from_seq, to_seq=request.to_seq, step=request.step,
        )  # fmt: skip
        job.apply_heartbeat(calls=(reply,))
    (verdict,) = job.run_diagnosis().verdicts
    assert verdict.culprits == (0, 1)
    assert "what rank 0 sent differs from what rank 1 received at or before call" in verdict.summary
    assert "after call 64" in verdict.summary
