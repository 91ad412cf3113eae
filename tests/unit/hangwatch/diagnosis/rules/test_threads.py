"""Ranks with one thread that waits while another one continues."""

from __future__ import annotations

from hangwatch.model.kinds import VerdictKind
from tests.simulation.scripted_job import ScriptedJob

from ..expect import make_frame


def _report_saver_stacks(job: ScriptedJob) -> None:
    collective = make_frame("barrier", "/x/site-packages/torch/distributed/distributed_c10d.py")
    for rank in (0, 2):
        job.report_stacks(rank, [make_frame("train")], [collective, make_frame("save")])
    job.report_stacks(1, [make_frame("train")], [make_frame("write_shard", text="open(path)")])


def test_thread_waits_while_its_rank_goes_on() -> None:
    job = ScriptedJob(3)
    job.add_group("saver", (0, 1, 2))
    job.make_calls(thread=1)
    job.send_heartbeats()
    for rank in (0, 2):
        job.make_call(rank, "barrier", group="saver", thread=2)
    for _ in range(7):
        job.advance_time(2)
        job.make_calls(thread=1)
        job.send_heartbeats()
        assert job.list_due_verdicts() == [], "no stack shows that a thread waits"
    _report_saver_stacks(job)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.SLOW_RANK,
        (1,),
        (0, 2),
    )
    assert verdict.site is not None and verdict.site.function == "write_shard"
    for _ in range(30):
        job.advance_time(2)
        job.make_calls(thread=1)
        job.send_heartbeats()
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.MISSING_RANK, (1,)), "the slow limit"


def test_rank_that_waits_with_a_thread_only_is_awaited_itself() -> None:
    """Rank 2's saver waits for rank 1's, while its main thread is in its own code, and rank 0 waits
    for that one.
    """
    job = ScriptedJob(3)
    job.add_group("saver", (1, 2))
    job.make_calls(thread=1)
    job.send_heartbeats()
    job.make_call(2, "barrier", group="saver", thread=2)
    job.advance_time(4)
    job.make_calls(thread=1)
    job.send_heartbeats()
    job.make_call(0, thread=1)
    job.make_call(1, thread=1)
    job.advance_time(14)
    job.send_heartbeats()
    job.report_stacks(
        2,
        [make_frame("evaluate", text="lock.acquire()")],
        [
            make_frame("barrier", "/x/site-packages/torch/distributed/distributed_c10d.py"),
            make_frame("save"),
        ],
    )
    verdicts = {(v.kind, v.culprits) for v in job.list_due_verdicts()}
    assert verdicts == {(VerdictKind.MISSING_RANK, (2,))}


def test_rank_whose_training_waits_for_its_saver() -> None:
    """The main threads train on for a while, then wait for the checkpoint."""
    job = ScriptedJob(3)
    job.add_group("saver", (0, 1, 2))
    job.make_calls(thread=1)
    job.send_heartbeats()
    for rank in (0, 2):
        job.make_call(rank, "barrier", group="saver", thread=2)
    for _ in range(3):
        job.advance_time(2)
        job.make_calls(thread=1)
        job.send_heartbeats()
    collective = make_frame("barrier", "/x/site-packages/torch/distributed/distributed_c10d.py")
    joined = [make_frame("join", "/usr/lib/python3.11/threading.py"), make_frame("main")]
    verdicts = []
    for second in range(13):
        job.advance_time(1)
        job.send_heartbeats()
        if second == 5:
            for rank in (0, 2):
                job.report_stacks(rank, joined, [collective])
            job.report_stacks(1, joined, [make_frame("write_shard", text="open(path)")])
        verdicts = job.list_due_verdicts()
    (verdict,) = verdicts
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.MISSING_RANK,
        (1,),
        (0, 2),
    )
    assert verdict.site is not None and verdict.site.function == "write_shard"
