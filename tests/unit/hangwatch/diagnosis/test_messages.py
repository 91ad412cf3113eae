"""Messages of verdicts: how they describe differing calls, and that they claim nothing unknown."""

from __future__ import annotations

import math

import pytest

from hangwatch.diagnosis.messages import describe_mismatch
from hangwatch.model.calls import Call, Signature, StreamKind
from hangwatch.model.groups import Group
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.ranks import ExceptionInfo, Lifecycle
from hangwatch.model.verdicts import CallClass, Verdict
from hangwatch.report.text import resolve_root_rank
from tests.simulation.scripted_job import ScriptedJob

from .expect import make_frame

GROUP = Group(name="7", desc="tp", ranks=(3, 4, 5))
SplitSizes = tuple[tuple[int, ...], tuple[int, ...]]


def make_coalesced_signature(*shapes: tuple[int, ...], cut: int = 8) -> Signature:
    shown = (*shapes[:cut], ()) if len(shapes) > cut else shapes
    return Signature(op="all_reduce_coalesced", shapes=shown, numel=sum(map(math.prod, shapes)))


def summarize_mismatch(left: Signature, right: Signature, *fields: str) -> str:
    """Rank 4's call is the left one."""
    calls = (
        CallClass(ranks=(4,), call=Call(seq=6, signature=left)),
        CallClass(ranks=(3, 5), call=Call(seq=6, signature=right)),
    )
    return describe_mismatch((4,), calls, fields, GROUP, 6)


def diagnose_one(job: ScriptedJob) -> Verdict:
    (verdict,) = job.list_due_verdicts()
    return verdict


@pytest.mark.parametrize(
    ("left", "right", "descriptions"),
    [
        (make_coalesced_signature((12,)), make_coalesced_signature((10,)), ("shape [12]", "shape [10]")),
        (make_coalesced_signature((8,), (4, 4), (12,)), make_coalesced_signature((8,), (16,), (10,)),
         ("3 tensors, number 3 of shape [12]", "3 tensors, number 3 of shape [10]")),
        (make_coalesced_signature((8,), (4,), (2,)), make_coalesced_signature((8,), (4,)), ("3 tensors, number 3 of shape [2]", "2 tensors")),
        (make_coalesced_signature((8,), (4,), ()), make_coalesced_signature((8,), (4,)), ("3 tensors, number 3 of shape []", "2 tensors")),
        (make_coalesced_signature(*[(8,)] * 8, (5,)), make_coalesced_signature(*[(8,)] * 8), ("more than 8 tensors", "8 tensors")),
        (make_coalesced_signature(*[(8,)] * 8, (5,)), make_coalesced_signature(*[(8,)] * 8, (6,)),
         ("more than 8 tensors, of which the first 8 agree", "more than 8 tensors, of which the first 8 agree")),
    ],
)  # fmt: skip
def test_first_differing_tensor_of_list_is_shown(
    left: Signature, right: Signature, descriptions: tuple[str, str]
) -> None:
    summary = summarize_mismatch(left, right, "shape")
    assert (
        summary
        == f"rank 4 called {left.op}({descriptions[0]}) where ranks 3, 5 called {left.op}({descriptions[1]}) (call"
        " 6 of group tp)"
    )


def test_a_root_is_named_as_a_rank_of_the_job() -> None:
    said = summarize_mismatch(
        Signature(op="broadcast", root=1), Signature(op="broadcast", root=0), "root"
    )
    assert (
        said
        == "rank 4 called broadcast(root 4) where ranks 3, 5 called broadcast(root 3) (call 6 of"
        " group tp)"
    )
    assert [resolve_root_rank(root, GROUP.ranks) for root in (0, 2, 3, None)] == [3, 5, 3, None]


def diagnose_all_to_all(*splits: SplitSizes) -> Verdict:
    job = ScriptedJob(len(splits))
    job.make_calls()
    for rank, parts in enumerate(splits):
        job.make_call(rank, "all_to_all_single", splits=parts)
    job.advance_time(1.1)
    return diagnose_one(job)


def test_mismatched_pair_of_all_to_all_is_named() -> None:
    """Rank 1 expects what it got the step before; what each of the others sends and expects is its
    own.
    """
    verdict = diagnose_all_to_all(
        ((1, 2, 3), (1, 4, 7)), ((4, 5, 6), (9, 9, 9)), ((7, 8, 10), (3, 6, 10))
    )
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (VerdictKind.MISMATCH, (1,), (0, 2))
    assert (
        verdict.summary
        == "rank 1 expects 9 elements from rank 0, which sends 2 (all_to_all_single, call 2 of"
        " group world)"
    )
    assert {c.ranks: c.call.signature.splits for c in verdict.calls} == {
        (1,): ((4, 5, 6), (9, 9, 9)), (0,): ((1, 2, 3), (1, 4, 7)), (2,): ((7, 8, 10), (3, 6, 10)),
    }  # fmt: skip


def test_all_to_all_ranks_with_equal_splits_are_grouped() -> None:
    even = ((16, 16, 16, 16), (16, 16, 16, 16))
    verdict = diagnose_all_to_all(even, even, even, ((1, 16, 16, 16), even[1]))
    assert verdict.culprits == (0, 3), "there is no evidence which of the two is wrong"
    verdict = diagnose_all_to_all(even, even, even, ((24, 24, 24, 16), even[1]))
    assert verdict.culprits == (3,)
    assert verdict.summary.startswith(
        "rank 3 sends 24 elements to rank 0, which expects 16 (all_to_all_single, call 2"
    )
    assert [c.ranks for c in verdict.calls] == [(3,), (0, 1, 2)]


def test_absent_sender_is_described_by_its_send() -> None:
    job = ScriptedJob(3)
    job.send_heartbeats()
    job.make_p2p_call(2, StreamKind.RECV, 1, blocking=True)
    job.advance_time(11)
    assert diagnose_one(job).summary.startswith(
        "rank 1 has not sent what rank 2 waits to receive (call 1 of group world), for which 1 rank"
        " waits"
    )


def test_absent_receiver_is_described_by_its_receive() -> None:
    job = ScriptedJob(3)
    job.send_heartbeats()
    job.make_p2p_call(2, StreamKind.SEND, 1, blocking=True)
    job.advance_time(11)
    assert diagnose_one(job).summary.startswith(
        "rank 1 has not received what rank 2 sends (call 1 of group world), for which 1 rank waits"
    )


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        (
            ExceptionInfo(
                type="RuntimeError", message="gloo/transport/tcp/pair.cc: Connection closed by peer"
            ),
            "; the errors of other ranks are consequences of it.",
        ),
        (
            ExceptionInfo(type="FileNotFoundError", message="shard-2.bin"),
            "; rank 2 also raised FileNotFoundError, which may be unrelated.",
        ),
        (
            ExceptionInfo(type="RuntimeError", message="sizes do not fit"),
            "Its exception came first.",
        ),
        (
            ExceptionInfo(type="KeyboardInterrupt", message=""),
            "; the errors of other ranks are consequences of it.",
        ),
    ],
)
def test_consequent_exceptions_are_claimed_only_if_known(theirs: ExceptionInfo, says: str) -> None:
    job = ScriptedJob(3)
    job.make_calls()
    job.send_heartbeats()
    job.end_process(
        1, status=1, exception=ExceptionInfo(type="FileNotFoundError", message="shard-1.bin")
    )
    job.advance_time(0.1)
    job.end_process(
        2,
        exception=theirs,
        **({"signal": 2} if theirs.type == "KeyboardInterrupt" else {"status": 1}),
    )
    job.advance_time(2)
    verdict = diagnose_one(job)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEAD_RANK, (1,))
    assert verdict.advice.endswith(says)


@pytest.mark.parametrize(
    ("seen", "says"),
    [(("next",), "It uses the CPU: a"), (("next", "next"), "It uses the CPU in the same function")],
)
def test_busy_rank_at_one_line_is_not_progressing(seen: tuple[str, ...], says: str) -> None:
    job = ScriptedJob(2)
    job.make_call(0)
    job.ranks[1].idle = False
    job.advance_time(8)
    job.send_heartbeats()
    for function in seen:
        job.advance_time(1.5)
        job.report_stack(1, make_frame(function))
    job.advance_time(2)
    verdict = diagnose_one(job)
    assert (verdict.kind, verdict.severity) == (VerdictKind.SLOW_RANK, Severity.WARNING)
    assert says in verdict.advice
    assert "hangwatch.phase()" in verdict.advice


def test_rank_in_changing_functions_is_slow() -> None:
    job = ScriptedJob(2)
    job.make_call(0)
    job.advance_time(8)
    job.send_heartbeats()
    for function in ("load", "parse"):
        job.advance_time(1.5)
        job.report_stack(1, make_frame(function))
    job.advance_time(2)
    assert diagnose_one(job).advice.startswith("Its stack changes: slow rather than stuck.")


def test_rank_in_phase_is_within_declared_time() -> None:
    job = ScriptedJob(2)
    job.make_call(0)
    job.ranks[1].phase = "evaluate"
    job.advance_time(11)
    verdict = diagnose_one(job)
    assert verdict.kind is VerdictKind.SLOW_RANK
    assert (
        verdict.advice
        == "Its script declared this phase: it may take until the limit of the phase."
    )


def test_ranks_waiting_in_other_call_are_shown_separately() -> None:
    job = ScriptedJob(4)
    job.add_group("pair", (0, 1))
    job.send_heartbeats()
    job.make_call(0, "barrier", group="pair")
    for rank in (2, 3):
        job.make_call(rank)
    job.advance_time(11)
    assert (
        diagnose_one(job).summary
        == "rank 1 has not entered barrier (call 1 of group pair), for which rank 0 waits, and 2"
        " more in other calls"
    )


def test_summary_names_rank_of_shown_line() -> None:
    job = ScriptedJob(4)
    job.make_calls()
    job.send_heartbeats()
    for rank in (0, 1):
        job.make_call(rank)
    job.advance_time(11)
    job.send_heartbeats()
    job.report_stack(3, make_frame("load", text="data = sock.recv(1)"))
    verdict = diagnose_one(job)
    assert verdict.culprits == (2, 3)
    assert (
        verdict.summary
        == "ranks 2-3 have not entered all_reduce (call 2 of group world), for which 2 ranks wait:"
        " rank 3 is at train.py:7 in load"
    )


def test_several_stopped_ranks() -> None:
    job = ScriptedJob(3)
    job.make_calls(done=False)
    for rank in (0, 2):
        job.ranks[rank].state = "T"
    job.send_heartbeats()
    job.advance_time(2)
    verdict = diagnose_one(job)
    assert (
        verdict.summary
        == "ranks 0, 2 are stopped (SIGSTOP or job control); 1 rank waits in all_reduce"
    )
    assert verdict.advice == "Resume them with kill -CONT."


def test_several_ranks_that_never_started() -> None:
    job = ScriptedJob(4)
    job.make_setup_call(0, done=False)
    for rank, lifecycle in enumerate(
        (Lifecycle.INITIALISING, Lifecycle.STARTING, Lifecycle.ALIVE, Lifecycle.STARTING)
    ):
        job.ranks[rank].lifecycle = lifecycle
    del job.ranks[3]
    job.send_heartbeats()
    job.advance_time(11)
    verdict = diagnose_one(job)
    assert verdict.summary == "ranks 1-3 never reached init_process_group, in which 1 rank waits"
    assert verdict.advice.startswith(
        "Rank 3 never reported: check that as many processes were started as WORLD_SIZE says, "
    )


@pytest.mark.parametrize(
    ("lifecycle", "says"),
    [
        (
            Lifecycle.ALIVE,
            "Their processes run but have not imported torch: check what they do before",
        ),
        (
            Lifecycle.STARTING,
            (
                "Their processes run but have not called init_process_group: their stacks show what"
                " they do instead."
            ),
        ),
    ],
)
def test_several_running_absent_ranks(lifecycle: Lifecycle, says: str) -> None:
    job = ScriptedJob(3)
    job.ranks[0].lifecycle = Lifecycle.INITIALISING
    job.make_setup_call(0, done=False)
    for rank in (1, 2):
        job.ranks[rank].lifecycle = lifecycle
    job.advance_time(11)
    assert diagnose_one(job).advice.startswith(says)


def test_line_of_two_threads_is_named_once() -> None:
    job = ScriptedJob(2)
    for thread in (1, 2):
        job.make_call(0, thread=thread, line=9)
    job.send_heartbeats()
    process = job.latest_attempt.processes[0]
    (stream,) = process.streams.values()
    one_call, other_call = job.ranks[0].streams["world"].calls
    stream.concurrent_calls, stream.concurrent_at = (one_call, other_call), job.now
    job.latest_attempt.concurrent_groups[stream.group.key] = None
    (verdict,) = [v for v in job.run_diagnosis().verdicts if v.kind is VerdictKind.CONCURRENT_USE]
    assert (
        verdict.summary
        == "two threads of rank 0 make calls on one group at the same time, at train.py:9 (call 2"
        " of group world)"
    )
