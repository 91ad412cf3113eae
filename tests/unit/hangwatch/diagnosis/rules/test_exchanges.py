"""What one rank sends and another one expects, and verdicts on what does not fit."""

from __future__ import annotations

import signal

import pytest

from hangwatch.model.calls import StreamKind, encode_invalid_peer
from hangwatch.model.kinds import VerdictKind
from tests.simulation.scripted_job import ScriptedJob


def test_peer_that_is_no_rank_is_an_invalid_argument() -> None:
    job = ScriptedJob(3)
    job.make_calls()
    job.make_p2p_call(0, StreamKind.RECV, encode_invalid_peer(-1))
    job.make_p2p_call(1, StreamKind.RECV, 0)
    job.make_call(2)
    job.advance_time(1.1)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting, verdict.differing_fields) == (
        VerdictKind.MISMATCH,
        (0,),
        (1, 2),
        ("peer",),
    )
    assert verdict.summary == "rank 0 called recv with source -1, which is no rank of group world"
    assert [call_class.call.peer for call_class in verdict.calls] == [-1]
    job.advance_time(30)
    assert [v.culprits for v in job.list_due_verdicts()] == [(0,)]


def test_call_that_completes_had_a_peer_that_its_backend_knows() -> None:
    job = ScriptedJob(2)
    job.make_p2p_call(0, StreamKind.RECV, encode_invalid_peer(-1), done=True)
    job.advance_time(1.1)
    assert job.list_due_verdicts() == []


@pytest.mark.parametrize(
    ("own_sizes", "root_list", "outliers"),
    [
        ((64, 64, 65, 64), (64, 64, 64, 64), (2,)),
        ((64, 64, 64, 64), (64, 64, 65, 64), (0,)),
        ((65, 64, 64, 64), (65, 65, 65, 65), (0,)),
        ((10, 20, 31, 40), (10, 20, 30, 40), (0, 2)),
        ((64, 64, 65, 64), (64, 64, 65, 64), ()),
    ],
)
@pytest.mark.parametrize("op", ["gather", "scatter"])
def test_sizes_of_members_are_compared_with_the_list_of_the_root(
    op: str, own_sizes: tuple[int, ...], root_list: tuple[int, ...], outliers: tuple[int, ...]
) -> None:
    job = ScriptedJob(4)
    job.make_calls()
    for rank, size in enumerate(own_sizes):
        parts = (root_list if rank == 0 else ()), (size,)
        splits = parts if op == "scatter" else parts[::-1]
        job.make_call(rank, op, reduce_op=None, root=0, splits=splits)
    job.advance_time(1.1)
    verdicts = job.list_due_verdicts()
    assert [(v.kind, v.differing_fields, v.culprits) for v in verdicts] == [
        (VerdictKind.MISMATCH, ("shape",), outliers) for _ in outliers[:1]
    ]


def test_two_sizes_of_a_pair_are_a_tie() -> None:
    job = ScriptedJob(2)
    job.make_call(0, "gather", reduce_op=None, root=0, splits=((64,), (64, 64)))
    job.make_call(1, "gather", reduce_op=None, root=0, splits=((65,), ()))
    job.advance_time(1.1)
    (verdict,) = job.list_due_verdicts()
    assert verdict.culprits == (0, 1)
    assert "rank 0 expects 64 elements from rank 1, which sends 65" in verdict.summary


def test_gather_whose_root_died_of_the_size_of_a_member_that_continued() -> None:
    job = ScriptedJob(4)
    job.make_calls()
    job.send_heartbeats()
    for rank in range(4):
        sizes = (65 if rank == 2 else 64,), ((64,) * 4 if rank == 0 else ())
        job.make_call(rank, "gather", reduce_op=None, root=0, splits=sizes, done=rank != 0)
    for rank in (1, 2, 3):
        job.make_call(rank, "barrier", reduce_op=None)
    job.end_process(0, signal=signal.SIGABRT)
    job.advance_time(2.5)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.MISMATCH, (2,))
