"""The cases that PyTorch's own tests of its analyzer describe, and what else process groups write:
to each the right verdict.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch.flight_recorder.analysis import OfflineDiagnosis, analyze_dumps
from hangwatch.flight_recorder.dumps import parse_dump
from hangwatch.model.kinds import VerdictKind
from tests.unit.recorders import Recorder, recorders
from tests.unit.server.ingest.test_fuzz import FUZZ


def finding(made: Iterable[Recorder]) -> OfflineDiagnosis:
    return analyze_dumps([parse_dump(one.rank, one.dump()) for one in made])


def job(ranks: int = 2, *, calls: int = 2, **told: Any) -> list[Recorder]:
    made = recorders(ranks, **told)
    for one in made:
        for _ in range(calls):
            one.call()
    return made


def calls(
    odd: dict[str, Any],
    others: dict[str, Any],
    *,
    rank: int = 1,
    ranks: int = 2,
    state: str = "scheduled",
    **told: Any,
) -> list[Recorder]:
    """All make one more call, of which one rank's is another."""
    made = job(ranks, **told)
    for one in made:
        one.call(**{"state": state, **(odd if one.rank == rank else others)})
    return made


def everybody(call: Callable[[Recorder], object], ranks: int = 2, **told: Any) -> list[Recorder]:
    made = job(ranks, **told)
    for one in made:
        call(one)
    return made


@dataclass(frozen=True, kw_only=True)
class Case:
    made: Callable[[], list[Recorder]]
    kind: VerdictKind | None = None
    culprits: tuple[int, ...] = ()
    fields: tuple[str, ...] = ()
    note: str = ""


SMALL: dict[str, Any] = {"inputs": [[4, 4]], "outputs": [[4, 4]]}
OPS = [
    "broadcast",
    "reduce",
    "all_gather",
    "all_reduce",
    "reduce_scatter",
    "_all_gather_base",
    "_reduce_scatter_base",
    "all_to_all",
]


def uneven(shapes: dict[int, list[list[int]]], op: str, end: str) -> list[Recorder]:
    """Parts of other sizes for each member, as torch's slow path writes them."""
    return everybody(lambda one: one.coalesced(op, shapes[one.rank], end=end, state="scheduled"))


def queued() -> list[Recorder]:
    made = job(3, timed=True)
    for one in made:
        one.call(state="scheduled" if one.rank == 2 else "started")
    return made


def opposite_order_on_the_device() -> list[Recorder]:
    """Both have queued both calls, and each device has begun the other one."""
    made = job(2, timed=True, a=[0, 1], b=[0, 1])
    for one in made:
        first, then = ("a", "b") if one.rank == 0 else ("b", "a")
        one.call(group=first, state="started")
        one.call(group=then, state="scheduled")
    return made


def behind_its_own_queue() -> list[Recorder]:
    """Rank 0's device is in the pair's call, for which rank 1 is missing; rank 2 waits for what
    rank 0 has only queued.
    """
    made = job(3, timed=True, pair=[0, 1], other=[0, 2])
    made[0].call(group="pair", state="started")
    made[0].call(group="other", state="scheduled")
    made[2].call(group="other", state="started")
    return made


def block_not_closed() -> list[Recorder]:
    """Rank 0 is between the parts of a coalesced call, so that its device got nothing of it."""
    made = job(3)
    for one in made:
        one.coalesced(
            "all_reduce", [[8], [8]], end="coalesced" if one.rank else None, state="scheduled"
        )
    return made


def cut_coalesced(differs: bool = False) -> list[Recorder]:
    """The oldest call in rank 0's ring has lost its first part."""
    made = recorders(2)
    for one in made:
        one.coalesced("broadcast", [[4], [5], [6]])
        one.call(state="completed")
        one.call("reduce" if differs and one.rank else "all_reduce", state="completed")
    made[0].overwrite(2)
    return made


def made_again(wrapped: bool, culprit: int | None = None) -> list[Recorder]:
    """After init_process_group for the second time, numbers begin anew."""
    made = job(2, calls=5)
    for one in made:
        one.again("0")
        one.call("broadcast")
        one.call("broadcast")
        if one.rank != culprit:
            one.call(state="scheduled" if culprit is not None else "completed")
    if wrapped:
        made[0].overwrite(5)
    return made


def sends(*order: int) -> list[Recorder]:
    made = job(2)
    made[0].batch(("send", 1, [100]), ("send", 1, [1000]), state="scheduled")
    made[1].batch(("recv", 0, [order[0]]), ("recv", 0, [order[1]]), state="scheduled")
    return made


def chain_of_messages(complete: bool, state: str = "completed") -> list[Recorder]:
    made = job(3)
    if complete:
        made[0].batch(("send", 1, [8]), state=state)
    made[1].batch(("recv", 0, [8]), ("send", 2, [8]), state=state if complete else "scheduled")
    made[2].batch(("recv", 1, [8]), state=state if complete else "scheduled")
    return made


def from_anybody(shape: int = 8, sent: bool = True) -> list[Recorder]:
    made = recorders(6, pair=[2, 5])
    for one in made:
        one.call()
    if sent:
        made[2].p2p("send", 5, shape=[shape], group="pair", state="scheduled")
    made[5].p2p("recv", None, shape=[8], group="pair", state="scheduled")
    return made


def half_a_batch() -> list[Recorder]:
    """Rank 0 queued two messages and never sent them off."""
    made = job(2)
    made[0].batch(("send", 1, [8]), ("recv", 1, [8]), ended=False)
    made[1].batch(("recv", 0, [8]), ("send", 0, [8]), state="scheduled")
    return made


def never_coalesced() -> list[Recorder]:
    made = job()
    made[1].coalesced("_reduce_oop", [[4], [4]], end="REDUCE_SCATTER_coalesced", state="scheduled")
    return made


def own_groups_of_one_name() -> list[Recorder]:
    made = [Recorder(rank, {"0": [0, 1], "1": [rank]}) for rank in range(2)]
    for one in made:
        one.call(inputs=[[4, 4]])
        one.call(inputs=[[5 + one.rank, 5]], group="1")
    return made


def timed_out() -> list[Recorder]:
    """What is retired and not completed has run into its time limit."""
    made = job(3)
    for one in made[:2]:
        one.call(state="started")
        one.entries[-1]["retired"] = True
    return made


def one_node_of_two() -> list[Recorder]:
    """The other's dumps are lost, and the ranks' layouts differ."""
    made = calls({"op": "broadcast"}, {}, rank=6, ranks=8)[4:]
    made[0].version = "2.4"
    return made


def without_numbers_of_groups(made: list[Recorder]) -> list[Recorder]:
    for one in made:
        for entry in one.entries:
            del entry["pg_id"], entry["frames"]
            for key in ("collective_seq_id", "p2p_seq_id"):
                entry[key] = str(entry[key])
            for key in ("input_dtypes", "output_dtypes"):
                entry[key] = "".join(entry[key][:1])
    return made


CASES = {
    "all match": Case(made=lambda: calls(SMALL, SMALL, state="completed")),
    "another type": Case(
        made=lambda: calls({**SMALL, "op": "all_gather"}, SMALL, ranks=3),
        kind=VerdictKind.MISMATCH,
        culprits=(1,),
        fields=("op",),
    ),
    "another type, of two": Case(
        made=lambda: calls({"op": "all_gather", "inputs": [[4, 4]], "outputs": [[32]]}, SMALL),
        kind=VerdictKind.MISMATCH,
        culprits=(0, 1),
        fields=("op",),
    ),
    "rank 0 is the odd one": Case(
        made=lambda: calls({"op": "broadcast"}, {}, rank=0, ranks=4),
        kind=VerdictKind.MISMATCH,
        culprits=(0,),
        fields=("op",),
    ),
    "another input size": Case(
        made=lambda: calls({"inputs": [[5, 4]]}, SMALL, ranks=3),
        kind=VerdictKind.MISMATCH,
        culprits=(1,),
        fields=("shape",),
    ),
    "an input that its own output does not fit, of two": Case(
        made=lambda: calls({"inputs": [[5, 4]], "outputs": [[4, 4]]}, SMALL),
        kind=VerdictKind.MISMATCH,
        culprits=(1,),
        fields=("shape",),
    ),
    "an output that its own input does not fit, of two": Case(
        made=lambda: calls({"inputs": [[4, 4]], "outputs": [[5, 4]]}, SMALL, rank=0),
        kind=VerdictKind.MISMATCH,
        culprits=(0,),
        fields=("shape",),
    ),
    "most cannot be right": Case(
        made=lambda: calls(SMALL, {"inputs": [[4, 4]], "outputs": [[5, 4]]}, ranks=3),
        kind=VerdictKind.MISMATCH,
        culprits=(0, 2),
        fields=("shape",),
    ),
    "nobody can be right": Case(
        made=lambda: everybody(
            lambda one: one.call(inputs=[[4, 4]], outputs=[[5, 4]], state="scheduled")
        ),
        kind=VerdictKind.NO_PROGRESS,
        note="cannot be right on any of its 2 ranks",
    ),
    "a view of another shape": Case(
        made=lambda: calls({"inputs": [[16]]}, SMALL, state="completed")
    ),
    "another type of its data": Case(
        made=lambda: calls({**SMALL, "dtype": "Half"}, SMALL, ranks=3),
        kind=VerdictKind.MISMATCH,
        culprits=(1,),
        fields=("dtype",),
    ),
    "another type of what comes out": Case(
        made=lambda: calls({**SMALL, "into": "Half"}, SMALL, ranks=3, state="completed"),
        kind=VerdictKind.MISMATCH,
        culprits=(1,),
        fields=("dtype",),
    ),
    "one has finished what another has only scheduled": Case(
        made=lambda: calls({"state": "completed"}, {})
    ),
    "a device has not begun what others have": Case(
        made=queued, kind=VerdictKind.MISSING_RANK, culprits=(2,)
    ),
    "devices in opposite order": Case(
        made=opposite_order_on_the_device, kind=VerdictKind.DEADLOCK, culprits=(0, 1)
    ),
    "a device that waits elsewhere": Case(
        made=behind_its_own_queue, kind=VerdictKind.MISSING_RANK, culprits=(1,)
    ),
    "gather, whose root alone has the list": Case(
        made=lambda: calls(
            {"op": "gather", "outputs": [[]], "into": ""},
            {"op": "gather", "outputs": [[64], [64]]},
            state="completed",
        )
    ),
    "gather, others with an undefined tensor": Case(
        made=lambda: calls(
            {"op": "gather", "outputs": [[0]], "into": "Undefined"},
            {"op": "gather", "outputs": [[64], [64]]},
            state="completed",
        )
    ),
    "gather, others with their own": Case(
        made=lambda: calls(
            {"op": "gather", "outputs": [[64]], "into": ""},
            {"op": "gather", "outputs": [[64], [64]]},
            state="completed",
        )
    ),
    "gather with two roots of three": Case(
        made=lambda: calls(
            {"op": "gather", "outputs": [[]]}, {"op": "gather", "outputs": [[64]] * 3}, ranks=3
        ),
        kind=VerdictKind.MISMATCH,
        culprits=(0, 2),
        fields=("root",),
    ),
    "scatter with two roots, whose lists gloo makes one tensor": Case(
        made=lambda: calls(
            {"op": "scatter", "inputs": [], "outputs": [[64]]},
            {"op": "scatter", "inputs": [[3, 64]], "outputs": [[64]]},
            ranks=3,
            backend="gloo",
        ),
        kind=VerdictKind.MISMATCH,
        culprits=(0, 2),
        fields=("root",),
    ),
    "scatter, whose root alone has the list": Case(
        made=lambda: calls(
            {"op": "scatter", "inputs": [], "outputs": [[64]]},
            {"op": "scatter", "inputs": [[64]] * 2, "outputs": [[64]]},
            state="completed",
        )
    ),
    "all_to_all_single with uneven parts": Case(
        made=lambda: calls(
            {"op": "all_to_all_single", "inputs": [[12]], "outputs": [[8]]},
            {"op": "all_to_all_single", "inputs": [[8]], "outputs": [[12]]},
            state="completed",
        )
    ),
    "all_to_all, one sends too much": Case(
        made=lambda: calls(
            {"op": "all_to_all", "inputs": [[12]], "outputs": [[8]]},
            {"op": "all_to_all", "inputs": [[8]]},
            ranks=4,
        ),
        kind=VerdictKind.MISMATCH,
        culprits=(1,),
        fields=("splits",),
    ),
    "all_to_all with uneven parts, of which one is wrong": Case(
        made=lambda: everybody(
            lambda one: one.call(
                "all_to_all",
                inputs=[[10 + 2 * one.rank]],
                outputs=[[13 - one.rank]],
                state="scheduled",
            ),
            ranks=4,
        ),
        kind=VerdictKind.NO_PROGRESS,
        note="nothing tells which rank's number is wrong",
    ),
    "all_to_all of lists that fit": Case(
        made=lambda: everybody(
            lambda one: one.call(
                "all_to_all",
                inputs=[[one.rank + 1], [2]],
                outputs=[[1 + one.rank], [2]] if one.rank else [[1], [2]],
            )
        )
    ),
    "all_to_all of lists that do not": Case(
        made=lambda: everybody(
            lambda one: one.call(
                "all_to_all",
                inputs=[[one.rank + 1]] * 3,
                outputs=[[1], [2], [4 if one.rank == 1 else 3]],
                state="scheduled",
            ),
            ranks=3,
        ),
        kind=VerdictKind.MISMATCH,
        culprits=(1, 2),
        fields=("splits",),
    ),
    "_all_gather_base of a wrong size": Case(
        made=lambda: everybody(
            lambda one: one.call(
                "_all_gather_base", inputs=[[8]], outputs=[[24]], state="scheduled"
            )
        ),
        kind=VerdictKind.NO_PROGRESS,
        note="8 elements in 1 tensor go in, and 24 in 1 come out",
    ),
    "all_gather into a list of a wrong length": Case(
        made=lambda: everybody(
            lambda one: one.call("all_gather", inputs=[[8]], outputs=[[8]] * 3, state="scheduled")
        ),
        kind=VerdictKind.NO_PROGRESS,
        note="cannot be right",
    ),
    "reduce_scatter of a list of a wrong length": Case(
        made=lambda: everybody(
            lambda one: one.call(
                "reduce_scatter", inputs=[[8]] * 3, outputs=[[8]], state="scheduled"
            )
        ),
        kind=VerdictKind.NO_PROGRESS,
        note="cannot be right",
    ),
    "all_gather into a flat buffer of a wrong size": Case(
        made=lambda: calls(
            {"op": "all_gather", "inputs": [[8]], "outputs": [[17]]},
            {"op": "all_gather", "inputs": [[8]], "outputs": [[16]]},
        ),
        kind=VerdictKind.MISMATCH,
        culprits=(1,),
        fields=("shape",),
    ),
    "reduce_scatter of a flat buffer of a wrong size": Case(
        made=lambda: calls(
            {"op": "reduce_scatter", "inputs": [[17]], "outputs": [[8]]},
            {"op": "reduce_scatter", "inputs": [[16]], "outputs": [[8]]},
            rank=0,
        ),
        kind=VerdictKind.MISMATCH,
        culprits=(0,),
        fields=("shape",),
    ),
    "uneven all_gather": Case(
        made=lambda: everybody(
            lambda one: one.call("all_gather", inputs=[[8 + one.rank]], outputs=[[8], [9]])
        )
    ),
    "allreduce_coalesced": Case(
        made=lambda: everybody(lambda one: one.call("allreduce_coalesced", inputs=[[8], [4]]))
    ),
    "broadcasts, coalesced": Case(
        made=lambda: everybody(lambda one: one.coalesced("broadcast", [[4, 4], [4, 4]]))
    ),
    "operations, coalesced, of which one differs": Case(
        made=lambda: everybody(
            lambda one: one.coalesced(
                "all_reduce", [[4], [5 if one.rank == 1 else 4]], state="scheduled"
            ),
            ranks=3,
        ),
        kind=VerdictKind.MISMATCH,
        culprits=(1,),
        fields=("shape",),
    ),
    "uneven all_gather, parts differ": Case(
        made=lambda: uneven(
            {0: [[4, 4], [5, 5]], 1: [[4, 4], [4, 4]]}, "_broadcast_oop", "ALLGATHER_coalesced"
        ),
        kind=VerdictKind.MISMATCH,
        culprits=(0, 1),
        fields=("shape",),
    ),
    "uneven reduce_scatter": Case(
        made=lambda: everybody(
            lambda one: one.coalesced(
                "_reduce_oop", [[4, 4], [5, 5]], end="REDUCE_SCATTER_coalesced"
            )
        )
    ),
    "a coalesced call that rank 0 never made": Case(
        made=never_coalesced,
        kind=VerdictKind.MISSING_RANK,
        culprits=(0,),
    ),
    "a coalesced call that is not sent off": Case(
        made=block_not_closed, kind=VerdictKind.MISSING_RANK, culprits=(0,)
    ),
    "a coalesced call that a ring has half lost": Case(made=cut_coalesced),
    "a coalesced call that a ring has half lost, and another that differs": Case(
        made=lambda: cut_coalesced(True), kind=VerdictKind.MISMATCH, culprits=(0, 1), fields=("op",)
    ),
    "a group that was made again": Case(made=lambda: made_again(False)),
    "a group that was made again, a ring that has lost the first": Case(
        made=lambda: made_again(True)
    ),
    "a group that was made again, one rank missing": Case(
        made=lambda: made_again(False, 1), kind=VerdictKind.MISSING_RANK, culprits=(1,)
    ),
    "a call that timed out": Case(made=timed_out, kind=VerdictKind.MISSING_RANK, culprits=(2,)),
    "one node of two": Case(
        made=one_node_of_two, kind=VerdictKind.MISMATCH, culprits=(6,), fields=("op",)
    ),
    "groups of one name, each rank in its own": Case(made=own_groups_of_one_name),
    "messages in order": Case(made=lambda: sends(100, 1000), kind=VerdictKind.NO_PROGRESS),
    "messages of a channel in another order": Case(
        made=lambda: sends(1000, 100), kind=VerdictKind.MISMATCH, culprits=(0, 1), fields=("shape",)
    ),
    "a chain of messages": Case(made=lambda: chain_of_messages(True)),
    "a chain of messages that nobody begins": Case(
        made=lambda: chain_of_messages(False), kind=VerdictKind.MISSING_RANK, culprits=(0,)
    ),
    "a batch that is not sent off": Case(
        made=half_a_batch, kind=VerdictKind.MISSING_RANK, culprits=(0,)
    ),
    "from anybody, and nobody sends": Case(
        made=lambda: from_anybody(sent=False), kind=VerdictKind.MISSING_RANK, culprits=(2,)
    ),
    "numbers as text, types as one word, no stacks": Case(
        made=lambda: without_numbers_of_groups(calls({"op": "broadcast"}, {}, rank=0, ranks=3)),
        kind=VerdictKind.MISMATCH,
        culprits=(0,),
        fields=("op",),
    ),
    "a pair of variants: all_gather": Case(
        made=lambda: calls({"op": "_all_gather_base"}, {"op": "all_gather"}, ranks=3),
        kind=VerdictKind.MISMATCH,
        culprits=(1,),
        fields=("op",),
    ),
    "a pair of variants: all_reduce": Case(
        made=lambda: calls({"op": "allreduce_coalesced"}, {}, ranks=3),
        kind=VerdictKind.MISMATCH,
        culprits=(1,),
        fields=("op",),
    ),
    "a pair of variants: reduce_scatter": Case(
        made=lambda: calls({"op": "_reduce_scatter_base"}, {"op": "reduce_scatter"}, ranks=3),
        kind=VerdictKind.MISMATCH,
        culprits=(1,),
        fields=("op",),
    ),
    "a pair of variants: all_to_all": Case(
        made=lambda: calls({"op": "all_to_all_single"}, {"op": "all_to_all"}, ranks=3),
        kind=VerdictKind.MISMATCH,
        culprits=(1,),
        fields=("op",),
    ),
}


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_verdict(name: str, as_json: bool) -> None:
    case = CASES[name]
    dumps = [(one.rank, one.dump()) for one in case.made()]
    found = analyze_dumps(
        [
            parse_dump(rank, json.loads(json.dumps(dump)) if as_json else dump)
            for rank, dump in dumps
        ]
    )
    told = [(v.kind, v.culprits, v.differing_fields) for v in found.verdicts]
    assert told == ([] if case.kind is None else [(case.kind, case.culprits, case.fields)]), [
        v.summary for v in found.verdicts
    ]
    assert case.note in " ".join(found.notes)


@pytest.mark.parametrize(
    "backend",
    ["nccl", "ncclx", "nccl2", "xccl", "rccl", "c10d", "unknown_backend", "weird:backend", ""],
)
def test_any_backend(backend: str) -> None:
    made = calls({"op": "broadcast"}, {}, rank=0, ranks=3, backend=backend)
    if not backend:
        for one in made:
            for entry in one.entries:
                entry["profiling_name"] = entry["profiling_name"].lstrip(":")
    assert [(v.kind, v.culprits) for v in finding(made).verdicts] == [(VerdictKind.MISMATCH, (0,))]


# Names of torch's analyzer, flight_recorder/components/types.py.
NAMES = [
    "broadcast", "_broadcast_oop", "reduce", "_reduce_oop", "all_gather", "all_gather_single", "all_gather_v", "all_reduce",
    "_all_gather_base", "all_gather_into_tensor_coalesced", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_v",
    "reduce_scatter_tensor_coalesced", "_reduce_scatter_base", "gather", "scatter", "all_to_all", "all_to_all_single",
    "all_to_all_v_single", "all_reduce_barrier", "barrier", "split", "new_window", "allreduce_coalesced", "ALLGATHER_coalesced",
    "REDUCE_SCATTER_coalesced", "coalesced", "an_operation_of_next_year",
]  # fmt: skip


@pytest.mark.parametrize("op", NAMES)
def test_every_operation(op: str) -> None:
    """All made it and are through; all are in it; one never came; one made another."""
    inputs = [[8, 2]] if "reduce_scatter" in op else [[4, 2]]
    outputs = [[4, 2]] if "reduce_scatter" in op else [[8, 2]] if "all_gather" in op else inputs
    call: dict[str, Any] = {"op": op, "inputs": inputs, "outputs": outputs}
    assert finding(everybody(lambda one: one.call(**call))).verdicts == ()
    assert [
        (v.kind, v.culprits)
        for v in finding(everybody(lambda one: one.call(**call, state="started"))).verdicts
    ] == [(VerdictKind.NO_PROGRESS, ())]
    late = job(3)
    for one in late[:2]:
        one.call(**call, state="started")
    assert [(v.kind, v.culprits) for v in finding(late).verdicts] == [
        (VerdictKind.MISSING_RANK, (2,))
    ]
    other = calls({"op": "something_else"}, {"op": op, "inputs": [], "outputs": []}, ranks=3)
    assert [(v.kind, v.culprits) for v in finding(other).verdicts] == [(VerdictKind.MISMATCH, (1,))]


def test_a_device_that_has_not_begun_is_said_so() -> None:
    [found] = finding(queued()).verdicts
    assert "its device has not begun it" in found.advice
    assert found.waiting == (0, 1)


def test_a_message_from_anybody_that_came_is_no_fault_of_the_sender() -> None:
    [found] = finding(from_anybody()).verdicts
    assert (found.kind, found.culprits) == (VerdictKind.NO_PROGRESS, ())


def test_messages_whose_beginning_was_overwritten_are_compared_only_where_both_ends_are_at_them() -> (
    None
):
    for timed in (False, True):
        made = job(2, timed=timed)
        for n in range(9):
            made[0].p2p("send", 1, shape=[n + 1])
            made[1].p2p("recv", 0, shape=[n + 1])
        made[0].p2p("send", 1, shape=[8], state="started")
        made[1].p2p("recv", 0, shape=[4], state="started" if timed else "scheduled")
        made[0].overwrite(6)
        made[1].overwrite(3)
        [found] = finding(made).verdicts
        expected = (
            (VerdictKind.MISMATCH, (0, 1), ("shape",))
            if timed
            else (VerdictKind.NO_PROGRESS, (), ())
        )
        assert (found.kind, found.culprits, found.differing_fields) == expected


def test_groups_that_members_tell_otherwise_are_noted() -> None:
    made = [
        Recorder(0, {"0": [0, 1, 2], "1": [0, 1]}),
        Recorder(1, {"0": [0, 1, 2], "1": [1, 2]}),
        Recorder(2, {"0": [0, 1, 2], "1": [1, 2]}),
    ]
    for one in made:
        one.call(group="1")
    assert "were groups made in another order?" in " ".join(finding(made).notes)


def test_counts_of_groups_are_read_by_their_order_where_the_ring_holds_nothing_of_them() -> None:
    """Rank 1's recorder knows the groups by other numbers than rank 0's, since it is not in all of
    them.
    """
    made = [
        Recorder(0, {"0": [0, 1], "1": [0], "2": [0, 1]}),
        Recorder(1, {"0": [0, 1], "2": [0, 1]}),
    ]
    made[0].call(group="1")
    for one in made:
        one.call(group="2")
        for _ in range(9):
            one.call()
    made[0].call(group="2", state="scheduled")
    for one in made:
        one.overwrite(5)
    [found] = finding(made).verdicts
    assert (found.kind, found.culprits, found.seq) == (VerdictKind.MISSING_RANK, (1,), 2)
    assert "no record" not in found.summary


@pytest.mark.parametrize(("age", "verdicts"), [(0.3, 0), (3.0, 1), (600.0, 1), (-5.0, 1)])
def test_dumps_of_a_job_that_ran_a_moment_before_accuse_nobody(age: float, verdicts: int) -> None:
    made = job(3)
    for one in made[1:]:
        one.call(state="scheduled")
    dumps = [parse_dump(one.rank, one.dump()) for one in made]
    found = analyze_dumps(dumps, {dump.rank: dump.call_time_range[1] + age for dump in dumps})
    assert len(found.verdicts) == verdicts
    assert found.inconclusive == (not verdicts)
    assert ("may have been running" in " ".join(found.notes)) == (not verdicts)


def test_a_backend_that_never_tells_what_is_over_is_judged_by_arrivals() -> None:
    """Nobody is in call 1 because no call is said to be finished."""
    made = job(3, calls=0, backend="ucc")
    for one in made:
        for _ in range(4):
            one.call(state="scheduled")
    assert finding(made).verdicts == ()
    for one in made[:2]:
        one.call(state="scheduled")
    [found] = finding(made).verdicts
    assert (found.kind, found.culprits, found.seq) == (VerdictKind.MISSING_RANK, (2,), 5)


def test_an_old_call_whose_end_nobody_looked_at_is_over_where_a_later_one_is() -> None:
    made = job(3, calls=0)
    for one in made:
        one.call(state="scheduled")
        one.call(state="completed")
    assert finding(made).verdicts == ()


def test_members_are_taken_from_other_dumps_where_one_does_not_tell_them() -> None:
    made = job(3, pair=[0, 2])
    for one in made:
        if one.rank != 1:
            one.call(group="pair")
            one.call(group="pair", state="scheduled" if one.rank else "completed")
    made[2].call(group="pair", state="scheduled")
    dumps = [one.dump() for one in made]
    del dumps[0]["pg_config"]
    found = analyze_dumps([parse_dump(rank, dump) for rank, dump in enumerate(dumps)])
    assert [(v.kind, v.culprits, v.waiting) for v in found.verdicts] == []
    made[2].entries[-2]["state"] = "completed"
    found = analyze_dumps([parse_dump(rank, dump) for rank, dump in enumerate(dumps)])
    assert [(v.kind, v.culprits, v.waiting) for v in found.verdicts] == [
        (VerdictKind.MISSING_RANK, (0,), (2,))
    ]


def test_dumps_that_were_left_over_from_an_earlier_run_are_pointed_out() -> None:
    made = job(4)
    for entry in made[3].entries:
        entry["time_created_ns"] -= 3600 * 10**9
    assert (
        "all calls in the dump of rank 3 were made at least 60 min before the others'"
        in " ".join(finding(made).notes)
    )
    assert finding(made[:3]).notes == (
        "no dump of rank 3: that is missing evidence, not a sign of death",
    )


@FUZZ
@given(
    ranks=st.integers(3, 6), fault=st.sampled_from(["missing", "op", "shape", "dtype"]), odd=st.integers(0, 5), timed=st.booleans(),
    backend=st.sampled_from(["nccl", "gloo"]), cuts=st.lists(st.integers(0, 40), min_size=6, max_size=6),
    ahead=st.lists(st.integers(0, 3), min_size=6, max_size=6), lost=st.sets(st.integers(0, 5), max_size=2), before=st.integers(0, 9),
    counts=st.booleans(),
)  # fmt: skip
def test_whatever_is_lost_of_the_evidence_nobody_else_is_named(
    ranks: int,
    fault: str,
    odd: int,
    timed: bool,
    backend: str,
    cuts: list[int],
    ahead: list[int],
    lost: set[int],
    before: int,
    counts: bool,
) -> None:
    """Rings of any length, some dumps gone, devices with calls queued behind the one that hangs."""
    odd %= ranks
    others = [rank for rank in range(ranks) if rank != odd]
    made = recorders(ranks, backend=backend, timed=timed, most=others, all=list(range(ranks)))
    for one in made:
        one.counts = counts
        for n in range(before):
            one.call()
            one.coalesced("broadcast", [[4], [5]], group="all")
            if one.rank != odd:
                one.call("reduce", inputs=[[n + 1]], group="most")
        call: dict[str, Any] = {"inputs": [[8]]}
        if one.rank == odd:
            call |= {
                "op": {"op": "broadcast"},
                "shape": {"inputs": [[9]]},
                "dtype": {"dtype": "Half"},
            }.get(fault, {})
        if one.rank != odd or fault != "missing":
            one.call(**call, state="started")
            for _ in range(ahead[one.rank] if backend == "nccl" else 0):
                one.call(state="scheduled")
        one.overwrite(min(cuts[one.rank], len(one.entries) - 1))
    # gloo does not tell how many ranks there are, unless the last one is there.
    left = [
        one for one in made if one.rank not in lost or (backend == "gloo" and one.rank == ranks - 1)
    ]
    for verdict in finding(left).verdicts if left else ():
        tied = verdict.kind is VerdictKind.MISMATCH and len(verdict.calls) == 2 == sum(
            len(told.ranks) for told in verdict.calls
        )
        assert set(verdict.culprits) <= {odd} or (tied and odd in verdict.culprits), verdict.summary
        if not any(cuts) and not lost and verdict.kind is not VerdictKind.NO_PROGRESS:
            assert verdict.culprits == (odd,)
