"""What verdicts say: of calls that differ, whom they name, and nothing that is not known."""

from __future__ import annotations

import math

import pytest

from hangwatch.diagnosis import messages
from hangwatch.model.calls import Call, Signature, StreamKind
from hangwatch.model.groups import Group
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.ranks import ExceptionInfo, Lifecycle
from hangwatch.model.verdicts import CallClass, Verdict
from hangwatch.report.text import resolve_root_rank
from tests.unit.jobs import Job

from .test_engine import frame

GROUP = Group(name="7", desc="tp", ranks=(3, 4, 5))
Splits = tuple[tuple[int, ...], tuple[int, ...]]


def coalesced(*shapes: tuple[int, ...], cut: int = 8) -> Signature:
    shown = (*shapes[:cut], ()) if len(shapes) > cut else shapes
    return Signature(op="all_reduce_coalesced", shapes=shown, numel=sum(map(math.prod, shapes)))


def summary(left: Signature, right: Signature, *fields: str) -> str:
    """Rank 4's call is the left one."""
    calls = (
        CallClass(ranks=(4,), call=Call(seq=6, signature=left)),
        CallClass(ranks=(3, 5), call=Call(seq=6, signature=right)),
    )
    return messages.mismatch((4,), calls, fields, GROUP, 6)


def one(job: Job) -> Verdict:
    (verdict,) = job.verdicts()
    return verdict


@pytest.mark.parametrize(
    ("left", "right", "told"),
    [
        (coalesced((12,)), coalesced((10,)), ("shape [12]", "shape [10]")),
        (coalesced((8,), (4, 4), (12,)), coalesced((8,), (16,), (10,)),
         ("3 tensors, number 3 of shape [12]", "3 tensors, number 3 of shape [10]")),
        (coalesced((8,), (4,), (2,)), coalesced((8,), (4,)), ("3 tensors, number 3 of shape [2]", "2 tensors")),
        (coalesced((8,), (4,), ()), coalesced((8,), (4,)), ("3 tensors, number 3 of shape []", "2 tensors")),
        (coalesced(*[(8,)] * 8, (5,)), coalesced(*[(8,)] * 8), ("more than 8 tensors", "8 tensors")),
        (coalesced(*[(8,)] * 8, (5,)), coalesced(*[(8,)] * 8, (6,)),
         ("more than 8 tensors, of which the first 8 agree", "more than 8 tensors, of which the first 8 agree")),
    ],
)  # fmt: skip
def test_of_lists_the_first_tensor_that_differs_is_told(
    left: Signature, right: Signature, told: tuple[str, str]
) -> None:
    said = summary(left, right, "shape")
    assert (
        said
        == f"rank 4 called {left.op}({told[0]}) where ranks 3, 5 called {left.op}({told[1]}) (call 6 of group tp)"
    )


def test_a_root_is_named_as_a_rank_of_the_job() -> None:
    said = summary(Signature(op="broadcast", root=1), Signature(op="broadcast", root=0), "root")
    assert (
        said
        == "rank 4 called broadcast(root 4) where ranks 3, 5 called broadcast(root 3) (call 6 of group tp)"
    )
    assert [resolve_root_rank(root, GROUP.ranks) for root in (0, 2, 3, None)] == [3, 5, 3, None]


def exchanges(*splits: Splits) -> Verdict:
    job = Job(len(splits))
    job.everybody()
    for rank, parts in enumerate(splits):
        job.call(rank, "all_to_all_single", splits=parts)
    job.wait(1.1)
    return one(job)


def test_of_an_all_to_all_a_pair_is_named_that_does_not_fit() -> None:
    """Rank 1 expects what it got the step before; what each of the others sends and expects is its
    own.
    """
    verdict = exchanges(((1, 2, 3), (1, 4, 7)), ((4, 5, 6), (9, 9, 9)), ((7, 8, 10), (3, 6, 10)))
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (VerdictKind.MISMATCH, (1,), (0, 2))
    assert (
        verdict.summary
        == "rank 1 expects 9 elements from rank 0, which sends 2 (all_to_all_single, call 2 of group world)"
    )
    assert {c.ranks: c.call.signature.splits for c in verdict.calls} == {
        (1,): ((4, 5, 6), (9, 9, 9)), (0,): ((1, 2, 3), (1, 4, 7)), (2,): ((7, 8, 10), (3, 6, 10)),
    }  # fmt: skip


def test_of_an_all_to_all_those_with_equal_parts_are_told_together() -> None:
    even = ((16, 16, 16, 16), (16, 16, 16, 16))
    verdict = exchanges(even, even, even, ((1, 16, 16, 16), even[1]))
    assert verdict.culprits == (0, 3), "nothing tells which of the two is wrong"
    verdict = exchanges(even, even, even, ((24, 24, 24, 16), even[1]))
    assert verdict.culprits == (3,)
    assert verdict.summary.startswith(
        "rank 3 sends 24 elements to rank 0, which expects 16 (all_to_all_single, call 2"
    )
    assert [c.ranks for c in verdict.calls] == [(3,), (0, 1, 2)]


def test_who_has_not_sent_is_not_said_to_be_missing_in_a_receive() -> None:
    job = Job(3)
    job.heartbeat()
    job.p2p(2, StreamKind.RECV, 1, blocking=True)
    job.wait(11)
    assert one(job).summary.startswith(
        "rank 1 has not sent what rank 2 waits to receive (call 1 of group world), for which 1 rank waits"
    )


def test_who_has_not_received_is_not_said_to_be_missing_in_a_send() -> None:
    job = Job(3)
    job.heartbeat()
    job.p2p(2, StreamKind.SEND, 1, blocking=True)
    job.wait(11)
    assert one(job).summary.startswith(
        "rank 1 has not received what rank 2 sends (call 1 of group world), for which 1 rank waits"
    )


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        (
            ExceptionInfo(
                type="RuntimeError", message="gloo/transport/tcp/pair.cc: Connection closed by peer"
            ),
            "is what followed from it.",
        ),
        (
            ExceptionInfo(type="FileNotFoundError", message="shard-2.bin"),
            "; rank 2 raised FileNotFoundError, too, which need not follow from it.",
        ),
        (
            ExceptionInfo(type="RuntimeError", message="sizes do not fit"),
            "Its exception came first.",
        ),
        (ExceptionInfo(type="KeyboardInterrupt", message=""), "is what followed from it."),
    ],
)
def test_what_others_raised_followed_from_a_first_exception_only_where_that_is_known(
    theirs: ExceptionInfo, says: str
) -> None:
    job = Job(3)
    job.everybody()
    job.heartbeat()
    job.die(1, status=1, raised=ExceptionInfo(type="FileNotFoundError", message="shard-1.bin"))
    job.wait(0.1)
    job.die(
        2, raised=theirs, **({"signal": 2} if theirs.type == "KeyboardInterrupt" else {"status": 1})
    )
    job.wait(2)
    verdict = one(job)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEAD_RANK, (1,))
    assert verdict.advice.endswith(says)


@pytest.mark.parametrize(
    ("seen", "says"),
    [(("next",), "It uses the CPU: a"), (("next", "next"), "It uses the CPU in the same function")],
)
def test_who_uses_the_cpu_at_one_place_is_not_said_to_move(
    seen: tuple[str, ...], says: str
) -> None:
    job = Job(2)
    job.call(0)
    job.ranks[1].idle = False
    job.wait(8)
    job.heartbeat()
    for function in seen:
        job.wait(1.5)
        job.stack(1, frame(function))
    job.wait(2)
    verdict = one(job)
    assert (verdict.kind, verdict.severity) == (VerdictKind.SLOW_RANK, Severity.WARNING)
    assert says in verdict.advice
    assert "hangwatch.phase()" in verdict.advice


def test_who_is_seen_in_different_functions_is_slow() -> None:
    job = Job(2)
    job.call(0)
    job.wait(8)
    job.heartbeat()
    for function in ("load", "parse"):
        job.wait(1.5)
        job.stack(1, frame(function))
    job.wait(2)
    assert one(job).advice.startswith("Its stack moves: slow rather than stuck.")


def test_who_is_in_a_phase_is_within_what_it_declared() -> None:
    job = Job(2)
    job.call(0)
    job.ranks[1].phase = "evaluate"
    job.wait(11)
    verdict = one(job)
    assert verdict.kind is VerdictKind.SLOW_RANK
    assert (
        verdict.advice == "Its script declared this phase: it may take as long as its limit says."
    )


def test_who_waits_in_another_call_than_the_one_that_is_told_is_told_apart() -> None:
    job = Job(4)
    job.group("pair", (0, 1))
    job.heartbeat()
    job.call(0, "barrier", group="pair")
    for rank in (2, 3):
        job.call(rank)
    job.wait(11)
    assert (
        one(job).summary
        == "rank 1 has not entered barrier (call 1 of group pair), for which rank 0 waits, and 2 more in other calls"
    )


def test_of_several_culprits_the_rank_is_named_whose_line_is_told() -> None:
    job = Job(4)
    job.everybody()
    job.heartbeat()
    for rank in (0, 1):
        job.call(rank)
    job.wait(11)
    job.heartbeat()
    job.stack(3, frame("load", text="data = sock.recv(1)"))
    verdict = one(job)
    assert verdict.culprits == (2, 3)
    assert verdict.summary == (
        "ranks 2-3 have not entered all_reduce (call 2 of group world), for which 2 ranks wait: rank 3 is at train.py:7 in load"
    )


def test_several_that_are_stopped() -> None:
    job = Job(3)
    job.everybody(done=False)
    for rank in (0, 2):
        job.ranks[rank].state = "T"
    job.heartbeat()
    job.wait(2)
    verdict = one(job)
    assert (
        verdict.summary
        == "ranks 0, 2 are stopped (SIGSTOP or job control); 1 rank waits in all_reduce"
    )
    assert verdict.advice == "kill -CONT lets them go on."


def test_several_that_never_started() -> None:
    job = Job(4)
    job.setup(0, done=False)
    for rank, lifecycle in enumerate(
        (Lifecycle.INITIALISING, Lifecycle.STARTING, Lifecycle.ALIVE, Lifecycle.STARTING)
    ):
        job.ranks[rank].lifecycle = lifecycle
    del job.ranks[3]
    job.heartbeat()
    job.wait(11)
    verdict = one(job)
    assert verdict.summary == "ranks 1-3 never reached init_process_group, in which 1 rank waits"
    assert verdict.advice.startswith(
        "Nothing was ever heard of rank 3: were as many processes started as WORLD_SIZE says, "
    )


@pytest.mark.parametrize(
    ("lifecycle", "says"),
    [
        (
            Lifecycle.ALIVE,
            "Their processes run but have not imported torch: see what they do before",
        ),
        (
            Lifecycle.STARTING,
            "Their processes run and have not called init_process_group: their stacks show what they do instead.",
        ),
    ],
)
def test_several_that_run_and_do_not_come(lifecycle: Lifecycle, says: str) -> None:
    job = Job(3)
    job.ranks[0].lifecycle = Lifecycle.INITIALISING
    job.setup(0, done=False)
    for rank in (1, 2):
        job.ranks[rank].lifecycle = lifecycle
    job.wait(11)
    assert one(job).advice.startswith(says)


def test_a_place_at_which_two_threads_are_is_named_once() -> None:
    job = Job(2)
    for thread in (1, 2):
        job.call(0, thread=thread, line=9)
    job.heartbeat()
    process = job.attempt.processes[0]
    (sequence,) = process.streams.values()
    one_call, other_call = job.ranks[0].places["world"].calls
    sequence.concurrent_calls, sequence.concurrent_at = (one_call, other_call), job.now
    job.attempt.concurrent_groups[sequence.group.key] = None
    (verdict,) = [v for v in job.diagnose().verdicts if v.kind is VerdictKind.CONCURRENT_USE]
    assert (
        verdict.summary
        == "two threads of rank 0 make calls on one group at the same time, at train.py:9 (call 2 of group world)"
    )
