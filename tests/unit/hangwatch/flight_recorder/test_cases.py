"""The cases of PyTorch's own tests of its analyzer, and other dumps that process groups write, each
with its right verdict.
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
from hangwatch.flight_recorder.calls import parse_dump
from hangwatch.model.kinds import VerdictKind
from tests.simulation.flight_recorders import SyntheticRecorder, make_recorders
from tests.unit.server.ingest.test_fuzz import FUZZ_SETTINGS


def analyze_recorders(recorders: Iterable[SyntheticRecorder]) -> OfflineDiagnosis:
    return analyze_dumps(
        [parse_dump(recorder.rank, recorder.make_dump()) for recorder in recorders]
    )


def run_job(ranks: int = 2, *, calls: int = 2, **options: Any) -> list[SyntheticRecorder]:
    recorders = make_recorders(ranks, **options)
    for recorder in recorders:
        for _ in range(calls):
            recorder.record_call()
    return recorders


def make_last_calls(
    outlier: dict[str, Any],
    others: dict[str, Any],
    *,
    rank: int = 1,
    ranks: int = 2,
    state: str = "scheduled",
    **options: Any,
) -> list[SyntheticRecorder]:
    """All ranks make one more call, and one rank's call differs."""
    recorders = run_job(ranks, **options)
    for recorder in recorders:
        recorder.record_call(**{"state": state, **(outlier if recorder.rank == rank else others)})
    return recorders


def call_on_all(
    call: Callable[[SyntheticRecorder], object], ranks: int = 2, **options: Any
) -> list[SyntheticRecorder]:
    recorders = run_job(ranks, **options)
    for recorder in recorders:
        call(recorder)
    return recorders


@dataclass(frozen=True, kw_only=True)
class FlightCase:
    build: Callable[[], list[SyntheticRecorder]]
    kind: VerdictKind | None = None
    culprits: tuple[int, ...] = ()
    fields: tuple[str, ...] = ()
    note_part: str = ""


SMALL_SHAPES: dict[str, Any] = {"inputs": [[4, 4]], "outputs": [[4, 4]]}


def make_uneven_shapes(
    shapes: dict[int, list[list[int]]], op: str, end: str
) -> list[SyntheticRecorder]:
    """Parts of different sizes per member, as torch's slow path records them."""
    return call_on_all(
        lambda recorder: recorder.record_coalesced(
            op, shapes[recorder.rank], end=end, state="scheduled"
        )
    )


def make_queued_calls() -> list[SyntheticRecorder]:
    recorders = run_job(3, timed=True)
    for recorder in recorders:
        recorder.record_call(state="scheduled" if recorder.rank == 2 else "started")
    return recorders


def make_opposite_device_order() -> list[SyntheticRecorder]:
    """Both ranks have queued both calls, and each device has started the other one first."""
    recorders = run_job(2, timed=True, a=[0, 1], b=[0, 1])
    for recorder in recorders:
        first, then = ("a", "b") if recorder.rank == 0 else ("b", "a")
        recorder.record_call(group=first, state="started")
        recorder.record_call(group=then, state="scheduled")
    return recorders


def make_blocked_by_own_queue() -> list[SyntheticRecorder]:
    """Rank 0's device is in the pair's call, for which rank 1 is missing; rank 2 waits for what
    rank 0 has only queued.
    """
    recorders = run_job(3, timed=True, pair=[0, 1], other=[0, 2])
    recorders[0].record_call(group="pair", state="started")
    recorders[0].record_call(group="other", state="scheduled")
    recorders[2].record_call(group="other", state="started")
    return recorders


def make_unclosed_block() -> list[SyntheticRecorder]:
    """Rank 0 is between the parts of a coalesced call, so its device has not received any of it."""
    recorders = run_job(3)
    for recorder in recorders:
        recorder.record_coalesced(
            "all_reduce", [[8], [8]], end="coalesced" if recorder.rank else None, state="scheduled"
        )
    return recorders


def make_cut_coalesced(differs: bool = False) -> list[SyntheticRecorder]:
    """The oldest call in rank 0's ring has lost its first part."""
    recorders = make_recorders(2)
    for recorder in recorders:
        recorder.record_coalesced("broadcast", [[4], [5], [6]])
        recorder.record_call(state="completed")
        recorder.record_call(
            "reduce" if differs and recorder.rank else "all_reduce", state="completed"
        )
    recorders[0].overwrite_oldest(2)
    return recorders


def recreate_default_group(wrapped: bool, culprit: int | None = None) -> list[SyntheticRecorder]:
    """After a second init_process_group, numbers start again at one."""
    recorders = run_job(2, calls=5)
    for recorder in recorders:
        recorder.recreate_group("0")
        recorder.record_call("broadcast")
        recorder.record_call("broadcast")
        if recorder.rank != culprit:
            recorder.record_call(state="scheduled" if culprit is not None else "completed")
    if wrapped:
        recorders[0].overwrite_oldest(5)
    return recorders


def make_sends(*order: int) -> list[SyntheticRecorder]:
    recorders = run_job(2)
    recorders[0].record_p2p_batch(("send", 1, [100]), ("send", 1, [1000]), state="scheduled")
    recorders[1].record_p2p_batch(
        ("recv", 0, [order[0]]), ("recv", 0, [order[1]]), state="scheduled"
    )
    return recorders


def make_message_chain(complete: bool, state: str = "completed") -> list[SyntheticRecorder]:
    recorders = run_job(3)
    if complete:
        recorders[0].record_p2p_batch(("send", 1, [8]), state=state)
    recorders[1].record_p2p_batch(
        ("recv", 0, [8]), ("send", 2, [8]), state=state if complete else "scheduled"
    )
    recorders[2].record_p2p_batch(("recv", 1, [8]), state=state if complete else "scheduled")
    return recorders


def make_any_source_receive(shape: int = 8, sent: bool = True) -> list[SyntheticRecorder]:
    recorders = make_recorders(6, pair=[2, 5])
    for recorder in recorders:
        recorder.record_call()
    if sent:
        recorders[2].record_p2p("send", 5, shape=[shape], group="pair", state="scheduled")
    recorders[5].record_p2p("recv", None, shape=[8], group="pair", state="scheduled")
    return recorders


def make_half_batch() -> list[SyntheticRecorder]:
    """Rank 0 queued two messages and did not submit them."""
    recorders = run_job(2)
    recorders[0].record_p2p_batch(("send", 1, [8]), ("recv", 1, [8]), ended=False)
    recorders[1].record_p2p_batch(("recv", 0, [8]), ("send", 0, [8]), state="scheduled")
    return recorders


def make_uncoalesced_calls() -> list[SyntheticRecorder]:
    recorders = run_job()
    recorders[1].record_coalesced(
        "_reduce_oop", [[4], [4]], end="REDUCE_SCATTER_coalesced", state="scheduled"
    )
    return recorders


def make_groups_of_one_name() -> list[SyntheticRecorder]:
    recorders = [SyntheticRecorder(rank, {"0": [0, 1], "1": [rank]}) for rank in range(2)]
    for recorder in recorders:
        recorder.record_call(inputs=[[4, 4]])
        recorder.record_call(inputs=[[5 + recorder.rank, 5]], group="1")
    return recorders


def make_timed_out_call() -> list[SyntheticRecorder]:
    """A call that is retired and not completed has reached its time limit."""
    recorders = run_job(3)
    for recorder in recorders[:2]:
        recorder.record_call(state="started")
        recorder.entries[-1]["retired"] = True
    return recorders


def drop_second_node() -> list[SyntheticRecorder]:
    """The other's dumps are lost, and the ranks' layouts differ."""
    recorders = make_last_calls({"op": "broadcast"}, {}, rank=6, ranks=8)[4:]
    recorders[0].version = "2.4"
    return recorders


def drop_group_status(recorders: list[SyntheticRecorder]) -> list[SyntheticRecorder]:
    for recorder in recorders:
        for entry in recorder.entries:
            del entry["pg_id"], entry["frames"]
            for key in ("collective_seq_id", "p2p_seq_id"):
                entry[key] = str(entry[key])
            for key in ("input_dtypes", "output_dtypes"):
                entry[key] = "".join(entry[key][:1])
    return recorders


CASES = {
    "all match": FlightCase(
        build=lambda: make_last_calls(SMALL_SHAPES, SMALL_SHAPES, state="completed")
    ),
    "another type": FlightCase(
        build=lambda: make_last_calls({**SMALL_SHAPES, "op": "all_gather"}, SMALL_SHAPES, ranks=3),
        kind=VerdictKind.MISMATCH,
        culprits=(1,),
        fields=("op",),
    ),
    "another type, of two": FlightCase(
        build=lambda: make_last_calls(
            {"op": "all_gather", "inputs": [[4, 4]], "outputs": [[32]]}, SMALL_SHAPES
        ),
        kind=VerdictKind.MISMATCH,
        culprits=(0, 1),
        fields=("op",),
    ),
    "rank 0 is the outlier": FlightCase(
        build=lambda: make_last_calls({"op": "broadcast"}, {}, rank=0, ranks=4),
        kind=VerdictKind.MISMATCH,
        culprits=(0,),
        fields=("op",),
    ),
    "another input size": FlightCase(
        build=lambda: make_last_calls({"inputs": [[5, 4]]}, SMALL_SHAPES, ranks=3),
        kind=VerdictKind.MISMATCH,
        culprits=(1,),
        fields=("shape",),
    ),
    "an input that its own output does not fit, of two": FlightCase(
        build=lambda: make_last_calls({"inputs": [[5, 4]], "outputs": [[4, 4]]}, SMALL_SHAPES),
        kind=VerdictKind.MISMATCH,
        culprits=(1,),
        fields=("shape",),
    ),
    "an output that its own input does not fit, of two": FlightCase(
        build=lambda: make_last_calls(
            {"inputs": [[4, 4]], "outputs": [[5, 4]]}, SMALL_SHAPES, rank=0
        ),
        kind=VerdictKind.MISMATCH,
        culprits=(0,),
        fields=("shape",),
    ),
    "most cannot be right": FlightCase(
        build=lambda: make_last_calls(
            SMALL_SHAPES, {"inputs": [[4, 4]], "outputs": [[5, 4]]}, ranks=3
        ),
        kind=VerdictKind.MISMATCH,
        culprits=(0, 2),
        fields=("shape",),
    ),
    "no rank can be right": FlightCase(
        build=lambda: call_on_all(
            lambda one: one.record_call(inputs=[[4, 4]], outputs=[[5, 4]], state="scheduled")
        ),
        kind=VerdictKind.NO_PROGRESS,
        note_part="is invalid on each of its 2 ranks",
    ),
    "a view of another shape": FlightCase(
        build=lambda: make_last_calls({"inputs": [[16]]}, SMALL_SHAPES, state="completed")
    ),
    "another type of its data": FlightCase(
        build=lambda: make_last_calls({**SMALL_SHAPES, "dtype": "Half"}, SMALL_SHAPES, ranks=3),
        kind=VerdictKind.MISMATCH,
        culprits=(1,),
        fields=("dtype",),
    ),
    "another type of what comes out": FlightCase(
        build=lambda: make_last_calls(
            {**SMALL_SHAPES, "into": "Half"}, SMALL_SHAPES, ranks=3, state="completed"
        ),
        kind=VerdictKind.MISMATCH,
        culprits=(1,),
        fields=("dtype",),
    ),
    "one has finished what another has only scheduled": FlightCase(
        build=lambda: make_last_calls({"state": "completed"}, {})
    ),
    "a device has not begun what others have": FlightCase(
        build=make_queued_calls, kind=VerdictKind.DEVICE_STUCK, culprits=(2,)
    ),
    "devices in opposite order": FlightCase(
        build=make_opposite_device_order, kind=VerdictKind.DEADLOCK, culprits=(0, 1)
    ),
    "a device that waits elsewhere": FlightCase(
        build=make_blocked_by_own_queue, kind=VerdictKind.MISSING_RANK, culprits=(1,)
    ),
    "gather, whose root alone has the list": FlightCase(
        build=lambda: make_last_calls(
            {"op": "gather", "outputs": [[]], "into": ""},
            {"op": "gather", "outputs": [[64], [64]]},
            state="completed",
        )
    ),
    "gather, others with an undefined tensor": FlightCase(
        build=lambda: make_last_calls(
            {"op": "gather", "outputs": [[0]], "into": "Undefined"},
            {"op": "gather", "outputs": [[64], [64]]},
            state="completed",
        )
    ),
    "gather, others with their own": FlightCase(
        build=lambda: make_last_calls(
            {"op": "gather", "outputs": [[64]], "into": ""},
            {"op": "gather", "outputs": [[64], [64]]},
            state="completed",
        )
    ),
    "gather with two roots of three": FlightCase(
        build=lambda: make_last_calls(
            {"op": "gather", "outputs": [[]]}, {"op": "gather", "outputs": [[64]] * 3}, ranks=3
        ),
        kind=VerdictKind.MISMATCH,
        culprits=(0, 2),
        fields=("root",),
    ),
    "scatter with two roots, whose lists gloo makes one tensor": FlightCase(
        build=lambda: make_last_calls(
            {"op": "scatter", "inputs": [], "outputs": [[64]]},
            {"op": "scatter", "inputs": [[3, 64]], "outputs": [[64]]},
            ranks=3,
            backend="gloo",
        ),
        kind=VerdictKind.MISMATCH,
        culprits=(0, 2),
        fields=("root",),
    ),
    "scatter, whose root alone has the list": FlightCase(
        build=lambda: make_last_calls(
            {"op": "scatter", "inputs": [], "outputs": [[64]]},
            {"op": "scatter", "inputs": [[64]] * 2, "outputs": [[64]]},
            state="completed",
        )
    ),
    "all_to_all_single with uneven parts": FlightCase(
        build=lambda: make_last_calls(
            {"op": "all_to_all_single", "inputs": [[12]], "outputs": [[8]]},
            {"op": "all_to_all_single", "inputs": [[8]], "outputs": [[12]]},
            state="completed",
        )
    ),
    "all_to_all, one sends too much": FlightCase(
        build=lambda: make_last_calls(
            {"op": "all_to_all", "inputs": [[12]], "outputs": [[8]]},
            {"op": "all_to_all", "inputs": [[8]]},
            ranks=4,
        ),
        kind=VerdictKind.MISMATCH,
        culprits=(1,),
        fields=("splits",),
    ),
    "all_to_all with uneven parts, of which one is wrong": FlightCase(
        build=lambda: call_on_all(
            lambda one: one.record_call(
                "all_to_all",
                inputs=[[10 + 2 * one.rank]],
                outputs=[[13 - one.rank]],
                state="scheduled",
            ),
            ranks=4,
        ),
        kind=VerdictKind.NO_PROGRESS,
        note_part="the dumps do not show which rank's number is wrong",
    ),
    "all_to_all of lists that fit": FlightCase(
        build=lambda: call_on_all(
            lambda one: one.record_call(
                "all_to_all",
                inputs=[[one.rank + 1], [2]],
                outputs=[[1 + one.rank], [2]] if one.rank else [[1], [2]],
            )
        )
    ),
    "all_to_all of lists that do not": FlightCase(
        build=lambda: call_on_all(
            lambda one: one.record_call(
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
    "_all_gather_base of a wrong size": FlightCase(
        build=lambda: call_on_all(
            lambda one: one.record_call(
                "_all_gather_base", inputs=[[8]], outputs=[[24]], state="scheduled"
            )
        ),
        kind=VerdictKind.NO_PROGRESS,
        note_part="1 input tensor with 8 elements, 1 output tensor with 24",
    ),
    "all_gather into a list of a wrong length": FlightCase(
        build=lambda: call_on_all(
            lambda one: one.record_call(
                "all_gather", inputs=[[8]], outputs=[[8]] * 3, state="scheduled"
            )
        ),
        kind=VerdictKind.NO_PROGRESS,
        note_part="is invalid",
    ),
    "reduce_scatter of a list of a wrong length": FlightCase(
        build=lambda: call_on_all(
            lambda one: one.record_call(
                "reduce_scatter", inputs=[[8]] * 3, outputs=[[8]], state="scheduled"
            )
        ),
        kind=VerdictKind.NO_PROGRESS,
        note_part="is invalid",
    ),
    "all_gather into a flat buffer of a wrong size": FlightCase(
        build=lambda: make_last_calls(
            {"op": "all_gather", "inputs": [[8]], "outputs": [[17]]},
            {"op": "all_gather", "inputs": [[8]], "outputs": [[16]]},
        ),
        kind=VerdictKind.MISMATCH,
        culprits=(1,),
        fields=("shape",),
    ),
    "reduce_scatter of a flat buffer of a wrong size": FlightCase(
        build=lambda: make_last_calls(
            {"op": "reduce_scatter", "inputs": [[17]], "outputs": [[8]]},
            {"op": "reduce_scatter", "inputs": [[16]], "outputs": [[8]]},
            rank=0,
        ),
        kind=VerdictKind.MISMATCH,
        culprits=(0,),
        fields=("shape",),
    ),
    "uneven all_gather": FlightCase(
        build=lambda: call_on_all(
            lambda one: one.record_call("all_gather", inputs=[[8 + one.rank]], outputs=[[8], [9]])
        )
    ),
    "allreduce_coalesced": FlightCase(
        build=lambda: call_on_all(
            lambda one: one.record_call("allreduce_coalesced", inputs=[[8], [4]])
        )
    ),
    "broadcasts, coalesced": FlightCase(
        build=lambda: call_on_all(lambda one: one.record_coalesced("broadcast", [[4, 4], [4, 4]]))
    ),
    "operations, coalesced, of which one differs": FlightCase(
        build=lambda: call_on_all(
            lambda one: one.record_coalesced(
                "all_reduce", [[4], [5 if one.rank == 1 else 4]], state="scheduled"
            ),
            ranks=3,
        ),
        kind=VerdictKind.MISMATCH,
        culprits=(1,),
        fields=("shape",),
    ),
    "uneven all_gather, parts differ": FlightCase(
        build=lambda: make_uneven_shapes(
            {0: [[4, 4], [5, 5]], 1: [[4, 4], [4, 4]]}, "_broadcast_oop", "ALLGATHER_coalesced"
        ),
        kind=VerdictKind.MISMATCH,
        culprits=(0, 1),
        fields=("shape",),
    ),
    "uneven reduce_scatter": FlightCase(
        build=lambda: call_on_all(
            lambda one: one.record_coalesced(
                "_reduce_oop", [[4, 4], [5, 5]], end="REDUCE_SCATTER_coalesced"
            )
        )
    ),
    "a coalesced call that rank 0 never made": FlightCase(
        build=make_uncoalesced_calls,
        kind=VerdictKind.MISSING_RANK,
        culprits=(0,),
    ),
    "a coalesced call that is not sent off": FlightCase(
        build=make_unclosed_block, kind=VerdictKind.MISSING_RANK, culprits=(0,)
    ),
    "a coalesced call that a ring has half lost": FlightCase(build=make_cut_coalesced),
    "a coalesced call that a ring has half lost, and another that differs": FlightCase(
        build=lambda: make_cut_coalesced(True),
        kind=VerdictKind.MISMATCH,
        culprits=(0, 1),
        fields=("op",),
    ),
    "a group that was made again": FlightCase(build=lambda: recreate_default_group(False)),
    "a group that was made again, a ring that has lost the first": FlightCase(
        build=lambda: recreate_default_group(True)
    ),
    "a group that was made again, one rank missing": FlightCase(
        build=lambda: recreate_default_group(False, 1), kind=VerdictKind.MISSING_RANK, culprits=(1,)
    ),
    "a call that timed out": FlightCase(
        build=make_timed_out_call, kind=VerdictKind.MISSING_RANK, culprits=(2,)
    ),
    "one node of two": FlightCase(
        build=drop_second_node, kind=VerdictKind.MISMATCH, culprits=(6,), fields=("op",)
    ),
    "groups of one name, each rank in its own": FlightCase(build=make_groups_of_one_name),
    "messages in order": FlightCase(
        build=lambda: make_sends(100, 1000), kind=VerdictKind.NO_PROGRESS
    ),
    "messages of a channel in another order": FlightCase(
        build=lambda: make_sends(1000, 100),
        kind=VerdictKind.MISMATCH,
        culprits=(0, 1),
        fields=("shape",),
    ),
    "a chain of messages": FlightCase(build=lambda: make_message_chain(True)),
    "a chain of messages that no rank starts": FlightCase(
        build=lambda: make_message_chain(False), kind=VerdictKind.MISSING_RANK, culprits=(0,)
    ),
    "a batch that is not sent off": FlightCase(
        build=make_half_batch, kind=VerdictKind.MISSING_RANK, culprits=(0,)
    ),
    "from any source, and no rank sends": FlightCase(
        build=lambda: make_any_source_receive(sent=False),
        kind=VerdictKind.MISSING_RANK,
        culprits=(2,),
    ),
    "numbers as text, types as one word, no stacks": FlightCase(
        build=lambda: drop_group_status(make_last_calls({"op": "broadcast"}, {}, rank=0, ranks=3)),
        kind=VerdictKind.MISMATCH,
        culprits=(0,),
        fields=("op",),
    ),
    "a pair of variants: all_gather": FlightCase(
        build=lambda: make_last_calls({"op": "_all_gather_base"}, {"op": "all_gather"}, ranks=3),
        kind=VerdictKind.MISMATCH,
        culprits=(1,),
        fields=("op",),
    ),
    "a pair of variants: all_reduce": FlightCase(
        build=lambda: make_last_calls({"op": "allreduce_coalesced"}, {}, ranks=3),
        kind=VerdictKind.MISMATCH,
        culprits=(1,),
        fields=("op",),
    ),
    "a pair of variants: reduce_scatter": FlightCase(
        build=lambda: make_last_calls(
            {"op": "_reduce_scatter_base"}, {"op": "reduce_scatter"}, ranks=3
        ),
        kind=VerdictKind.MISMATCH,
        culprits=(1,),
        fields=("op",),
    ),
    "a pair of variants: all_to_all": FlightCase(
        build=lambda: make_last_calls({"op": "all_to_all_single"}, {"op": "all_to_all"}, ranks=3),
        kind=VerdictKind.MISMATCH,
        culprits=(1,),
        fields=("op",),
    ),
}


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_case_verdict(name: str, as_json: bool) -> None:
    case = CASES[name]
    dumps = [(recorder.rank, recorder.make_dump()) for recorder in case.build()]
    diagnosis = analyze_dumps(
        [
            parse_dump(rank, json.loads(json.dumps(dump)) if as_json else dump)
            for rank, dump in dumps
        ]
    )
    verdicts = [(v.kind, v.culprits, v.differing_fields) for v in diagnosis.verdicts]
    assert verdicts == ([] if case.kind is None else [(case.kind, case.culprits, case.fields)]), [
        v.summary for v in diagnosis.verdicts
    ]
    assert case.note_part in " ".join(diagnosis.notes)


@pytest.mark.parametrize(
    "backend",
    ["nccl", "ncclx", "nccl2", "xccl", "rccl", "c10d", "unknown_backend", "weird:backend", ""],
)
def test_verdict_with_any_backend(backend: str) -> None:
    recorders = make_last_calls({"op": "broadcast"}, {}, rank=0, ranks=3, backend=backend)
    if not backend:
        for recorder in recorders:
            for entry in recorder.entries:
                entry["profiling_name"] = entry["profiling_name"].lstrip(":")
    assert [(v.kind, v.culprits) for v in analyze_recorders(recorders).verdicts] == [
        (VerdictKind.MISMATCH, (0,))
    ]


# Names of torch's analyzer, flight_recorder/components/types.py.
OPERATION_NAMES = [
    "broadcast", "_broadcast_oop", "reduce", "_reduce_oop", "all_gather", "all_gather_single", "all_gather_v", "all_reduce",
    "_all_gather_base", "all_gather_into_tensor_coalesced", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_v",
    "reduce_scatter_tensor_coalesced", "_reduce_scatter_base", "gather", "scatter", "all_to_all", "all_to_all_single",
    "all_to_all_v_single", "all_reduce_barrier", "barrier", "split", "new_window", "allreduce_coalesced", "ALLGATHER_coalesced",
    "REDUCE_SCATTER_coalesced", "coalesced", "an_operation_of_next_year",
]  # fmt: skip


@pytest.mark.parametrize("op", OPERATION_NAMES)
def test_every_operation_is_known(op: str) -> None:
    """All ranks have completed the call; all are in it; one has not entered it; one made another."""
    inputs = [[8, 2]] if "reduce_scatter" in op else [[4, 2]]
    outputs = [[4, 2]] if "reduce_scatter" in op else [[8, 2]] if "all_gather" in op else inputs
    call: dict[str, Any] = {"op": op, "inputs": inputs, "outputs": outputs}
    assert (
        analyze_recorders(call_on_all(lambda recorder: recorder.record_call(**call))).verdicts == ()
    )
    assert [
        (v.kind, v.culprits)
        for v in analyze_recorders(
            call_on_all(lambda recorder: recorder.record_call(**call, state="started"))
        ).verdicts
    ] == [(VerdictKind.NO_PROGRESS, ())]
    late = run_job(3)
    for recorder in late[:2]:
        recorder.record_call(**call, state="started")
    assert [(v.kind, v.culprits) for v in analyze_recorders(late).verdicts] == [
        (VerdictKind.MISSING_RANK, (2,))
    ]
    other = make_last_calls(
        {"op": "something_else"}, {"op": op, "inputs": [], "outputs": []}, ranks=3
    )
    assert [(v.kind, v.culprits) for v in analyze_recorders(other).verdicts] == [
        (VerdictKind.MISMATCH, (1,))
    ]


def test_device_that_has_not_started_is_reported() -> None:
    [verdict] = analyze_recorders(make_queued_calls()).verdicts
    assert "has queued all_reduce" in verdict.summary
    assert "its device has not begun it" in verdict.summary
    assert "not entered" not in verdict.summary + verdict.advice
    assert verdict.waiting == (0, 1)


def test_received_any_source_message_does_not_blame_sender() -> None:
    [verdict] = analyze_recorders(make_any_source_receive()).verdicts
    assert (verdict.kind, verdict.culprits) == (VerdictKind.NO_PROGRESS, ())


def test_overwritten_channels_are_compared_only_at_common_messages() -> None:
    for timed in (False, True):
        recorders = run_job(2, timed=timed)
        for n in range(9):
            recorders[0].record_p2p("send", 1, shape=[n + 1])
            recorders[1].record_p2p("recv", 0, shape=[n + 1])
        recorders[0].record_p2p("send", 1, shape=[8], state="started")
        recorders[1].record_p2p("recv", 0, shape=[4], state="started" if timed else "scheduled")
        recorders[0].overwrite_oldest(6)
        recorders[1].overwrite_oldest(3)
        [verdict] = analyze_recorders(recorders).verdicts
        expected = (
            (VerdictKind.MISMATCH, (0, 1), ("shape",))
            if timed
            else (VerdictKind.NO_PROGRESS, (), ())
        )
        assert (verdict.kind, verdict.culprits, verdict.differing_fields) == expected


def test_contradicting_group_members_are_recorded() -> None:
    recorders = [
        SyntheticRecorder(0, {"0": [0, 1, 2], "1": [0, 1]}),
        SyntheticRecorder(1, {"0": [0, 1, 2], "1": [1, 2]}),
        SyntheticRecorder(2, {"0": [0, 1, 2], "1": [1, 2]}),
    ]
    for recorder in recorders:
        recorder.record_call(group="1")
    assert "were groups created in a different order?" in " ".join(
        analyze_recorders(recorders).notes
    )


def test_group_counts_are_read_by_order_without_entries() -> None:
    """Rank 1's recorder knows the groups by other numbers than rank 0's, since it is not in all of
    them.
    """
    recorders = [
        SyntheticRecorder(0, {"0": [0, 1], "1": [0], "2": [0, 1]}),
        SyntheticRecorder(1, {"0": [0, 1], "2": [0, 1]}),
    ]
    recorders[0].record_call(group="1")
    for recorder in recorders:
        recorder.record_call(group="2")
        for _ in range(9):
            recorder.record_call()
    recorders[0].record_call(group="2", state="scheduled")
    for recorder in recorders:
        recorder.overwrite_oldest(5)
    [verdict] = analyze_recorders(recorders).verdicts
    assert (verdict.kind, verdict.culprits, verdict.seq) == (VerdictKind.MISSING_RANK, (1,), 2)
    assert "no record" not in verdict.summary


@pytest.mark.parametrize(("age", "verdicts"), [(0.3, 0), (3.0, 1), (600.0, 1), (-5.0, 1)])
def test_dumps_of_just_running_job_blame_no_rank(age: float, verdicts: int) -> None:
    recorders = run_job(3)
    for recorder in recorders[1:]:
        recorder.record_call(state="scheduled")
    dumps = [parse_dump(recorder.rank, recorder.make_dump()) for recorder in recorders]
    diagnosis = analyze_dumps(dumps, {dump.rank: dump.call_time_range[1] + age for dump in dumps})
    assert len(diagnosis.verdicts) == verdicts
    assert diagnosis.inconclusive == (not verdicts)
    assert ("may have been running" in " ".join(diagnosis.notes)) == (not verdicts)


def test_backend_without_completion_is_judged_by_arrivals() -> None:
    """No rank is in call 1 merely because no call is marked as complete."""
    recorders = run_job(3, calls=0, backend="ucc")
    for recorder in recorders:
        for _ in range(4):
            recorder.record_call(state="scheduled")
    assert analyze_recorders(recorders).verdicts == ()
    for recorder in recorders[:2]:
        recorder.record_call(state="scheduled")
    [verdict] = analyze_recorders(recorders).verdicts
    assert (verdict.kind, verdict.culprits, verdict.seq) == (VerdictKind.MISSING_RANK, (2,), 5)


def test_old_call_is_complete_when_later_one_is() -> None:
    recorders = run_job(3, calls=0)
    for recorder in recorders:
        recorder.record_call(state="scheduled")
        recorder.record_call(state="completed")
    assert analyze_recorders(recorders).verdicts == ()


def test_members_missing_in_dump_come_from_other_dumps() -> None:
    recorders = run_job(3, pair=[0, 2])
    for recorder in recorders:
        if recorder.rank != 1:
            recorder.record_call(group="pair")
            recorder.record_call(group="pair", state="scheduled" if recorder.rank else "completed")
    recorders[2].record_call(group="pair", state="scheduled")
    dumps = [recorder.make_dump() for recorder in recorders]
    del dumps[0]["pg_config"]
    diagnosis = analyze_dumps([parse_dump(rank, dump) for rank, dump in enumerate(dumps)])
    assert [(v.kind, v.culprits, v.waiting) for v in diagnosis.verdicts] == []
    recorders[2].entries[-2]["state"] = "completed"
    diagnosis = analyze_dumps([parse_dump(rank, dump) for rank, dump in enumerate(dumps)])
    assert [(v.kind, v.culprits, v.waiting) for v in diagnosis.verdicts] == [
        (VerdictKind.MISSING_RANK, (0,), (2,))
    ]


def test_leftover_dumps_of_earlier_run_are_reported() -> None:
    recorders = run_job(4)
    for entry in recorders[3].entries:
        entry["time_created_ns"] -= 3600 * 10**9
    assert "all calls in the dump of rank 3 were made at least 60 min before the calls" in " ".join(
        analyze_recorders(recorders).notes
    )
    assert analyze_recorders(recorders[:3]).notes == (
        "no dump of rank 3: that is missing evidence, not a sign of death",
    )


@FUZZ_SETTINGS
@given(
    ranks=st.integers(3, 6), fault=st.sampled_from(["missing", "op", "shape", "dtype"]), odd=st.integers(0, 5), timed=st.booleans(),
    backend=st.sampled_from(["nccl", "gloo"]), cuts=st.lists(st.integers(0, 40), min_size=6, max_size=6),
    ahead=st.lists(st.integers(0, 3), min_size=6, max_size=6), lost=st.sets(st.integers(0, 5), max_size=2), before=st.integers(0, 9),
    counts=st.booleans(),
)  # fmt: skip
def test_lost_evidence_blames_no_other_rank(
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
    recorders = make_recorders(
        ranks, backend=backend, timed=timed, most=others, all=list(range(ranks))
    )
    for recorder in recorders:
        recorder.has_status = counts
        for n in range(before):
            recorder.record_call()
            recorder.record_coalesced("broadcast", [[4], [5]], group="all")
            if recorder.rank != odd:
                recorder.record_call("reduce", inputs=[[n + 1]], group="most")
        call: dict[str, Any] = {"inputs": [[8]]}
        if recorder.rank == odd:
            faults: dict[str, dict[str, Any]] = {
                "op": {"op": "broadcast"},
                "shape": {"inputs": [[9]]},
                "dtype": {"dtype": "Half"},
            }
            call |= faults.get(fault, {})
        if recorder.rank != odd or fault != "missing":
            recorder.record_call(**call, state="started")
            for _ in range(ahead[recorder.rank] if backend == "nccl" else 0):
                recorder.record_call(state="scheduled")
        recorder.overwrite_oldest(min(cuts[recorder.rank], len(recorder.entries) - 1))
    # gloo does not record the number of ranks, unless the last one's dump is present.
    left = [
        recorder
        for recorder in recorders
        if recorder.rank not in lost or (backend == "gloo" and recorder.rank == ranks - 1)
    ]
    for verdict in analyze_recorders(left).verdicts if left else ():
        tied = verdict.kind is VerdictKind.MISMATCH and len(verdict.calls) == 2 == sum(
            len(call_ranks.ranks) for call_ranks in verdict.calls
        )
        assert set(verdict.culprits) <= {odd} or (tied and odd in verdict.culprits), verdict.summary
        if not any(cuts) and not lost and verdict.kind is not VerdictKind.NO_PROGRESS:
            assert verdict.culprits == (odd,)
