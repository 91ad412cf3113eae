"""The diagnosis from Flight Recorder dumps alone."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest

from hangwatch.flight_recorder.analysis import OfflineDiagnosis, analyze_dumps
from hangwatch.flight_recorder.calls import FlightDumpError, parse_dump
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.verdicts import Verdict
from tests.simulation.flight_recorders import SyntheticRecorder, make_recorders


def analyze_recorders(recorders: Iterable[SyntheticRecorder]) -> OfflineDiagnosis:
    return analyze_dumps(
        [parse_dump(recorder.rank, recorder.make_dump()) for recorder in recorders]
    )


def analyze_only(recorders: Iterable[SyntheticRecorder]) -> Verdict:
    verdicts = analyze_recorders(recorders).verdicts
    assert len(verdicts) == 1, [v.summary for v in verdicts]
    return verdicts[0]


def make_healthy_dumps(
    ranks: int = 4, backend: str = "nccl", calls: int = 5, **groups: list[int]
) -> list[SyntheticRecorder]:
    recorders = make_recorders(ranks, backend=backend, version="2.10", timed=False, **groups)
    for recorder in recorders:
        for _ in range(calls):
            recorder.record_call()
    return recorders


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("odd", [0, 2])
def test_outlier_is_named_even_if_rank_0(backend: str, odd: int) -> None:
    recorders = make_healthy_dumps(backend=backend)
    for recorder in recorders:
        recorder.record_call(
            "broadcast" if recorder.rank == odd else "all_reduce",
            state="scheduled",
            line=30 + recorder.rank,
        )
    verdict = analyze_only(recorders)
    assert (verdict.kind, verdict.culprits, verdict.differing_fields, verdict.seq) == (
        VerdictKind.MISMATCH,
        (odd,),
        ("op",),
        6,
    )
    assert verdict.site is not None
    assert (verdict.site.file, verdict.site.line, verdict.site.function) == (
        "/home/me/train.py",
        30 + odd,
        "step",
    )


@pytest.mark.parametrize(
    ("fields", "odd"),
    [
        (("shape",), {"inputs": [[5, 4]]}),
        (("shape",), {"outputs": [[5, 4]]}),
        (("dtype",), {"dtype": "Half"}),
        (("shape",), {"op": "all_gather", "outputs": [[4, 64]] * 2}),
        (("shape",), {"op": "_reduce_scatter_base", "inputs": [[128]]}),
    ],
)
def test_rank_with_different_shape_or_dtype_is_named(
    fields: tuple[str, ...], odd: dict[str, object]
) -> None:
    recorders = make_healthy_dumps()
    for recorder in recorders:
        call = {"op": odd.get("op", "all_reduce"), **(odd if recorder.rank == 1 else {})}
        recorder.record_call(state="scheduled", **call)  # type: ignore[arg-type]
    verdict = analyze_only(recorders)
    assert (verdict.kind, verdict.culprits, verdict.differing_fields) == (
        VerdictKind.MISMATCH,
        (1,),
        fields,
    )


def test_allowed_differences_are_no_mismatch() -> None:
    recorders = make_healthy_dumps()
    for recorder in recorders:
        root = recorder.rank == 0
        recorder.record_call("gather", outputs=[[64]] * 4 if root else [])
        recorder.record_call("scatter", inputs=[[64]] * 4 if root else [], outputs=[[64]])
        recorder.record_call(
            "all_gather", inputs=[[recorder.rank + 1]], outputs=[[1], [2], [3], [4]]
        )
        recorder.record_call(
            "all_to_all", inputs=[[10 + recorder.rank]], outputs=[[13 - recorder.rank]]
        )
        recorder.record_call("all_reduce_barrier", inputs=[[1]])
    assert analyze_recorders(recorders).verdicts == ()


def test_oversized_message_blames_sender() -> None:
    recorders = make_healthy_dumps()
    for recorder in recorders:
        recorder.record_call(
            "all_to_all",
            inputs=[[12 if recorder.rank == 2 else 8]],
            outputs=[[8]],
            state="scheduled",
        )
    verdict = analyze_only(recorders)
    assert (verdict.kind, verdict.culprits, verdict.differing_fields) == (
        VerdictKind.MISMATCH,
        (2,),
        ("splits",),
    )


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_missing_rank_is_reported_with_last_call(backend: str) -> None:
    recorders = make_healthy_dumps(backend=backend)
    for recorder in recorders:
        if recorder.rank != 2:
            recorder.record_call(state="scheduled")
    verdict = analyze_only(recorders)
    assert (verdict.kind, verdict.culprits, verdict.waiting, verdict.seq) == (
        VerdictKind.MISSING_RANK,
        (2,),
        (0, 1, 3),
        6,
    )
    assert "last seen in all_reduce at train.py:10" in verdict.advice


def test_rank_without_calls_is_missing() -> None:
    recorders = make_recorders(3)
    for recorder in recorders[:2]:
        recorder.record_call(state="scheduled")
    assert (analyze_only(recorders).kind, analyze_only(recorders).culprits) == (
        VerdictKind.MISSING_RANK,
        (2,),
    )
    assert "contains no calls" in " ".join(analyze_recorders(recorders).notes)


def test_calls_queued_behind_an_unfinished_one_blame_no_rank() -> None:
    """Ranks may run ahead of their device by different numbers of calls; the missing rank is missing
    in the first unfinished one.
    """
    recorders = make_healthy_dumps(3)
    for recorder in recorders[:2]:
        for _ in range(3 - recorder.rank):
            recorder.record_call(state="scheduled")
    verdict = analyze_only(recorders)
    assert (verdict.culprits, verdict.seq) == ((2,), 6)


def test_same_call_unfinished_on_all_ranks() -> None:
    recorders = make_healthy_dumps()
    for recorder in recorders:
        recorder.record_call(state="started")
    assert (analyze_only(recorders).kind, analyze_only(recorders).culprits) == (
        VerdictKind.NO_PROGRESS,
        (),
    )


def test_call_completed_by_some_before_dump_is_no_hang() -> None:
    recorders = make_healthy_dumps()
    for recorder in recorders:
        recorder.record_call(state="completed" if recorder.rank else "started")
    assert analyze_recorders(recorders).verdicts == ()


def test_unretired_gloo_call_is_no_hang() -> None:
    recorders = make_healthy_dumps(3, backend="gloo")
    for recorder in recorders:
        recorder.record_call(state="completed" if recorder.rank == 1 else "scheduled")
    assert analyze_recorders(recorders).verdicts == ()
    for recorder in recorders[:2]:
        recorder.record_call(state="scheduled")
    assert (analyze_only(recorders).kind, analyze_only(recorders).culprits) == (
        VerdictKind.MISSING_RANK,
        (2,),
    )


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_two_roots_of_one_gather_are_both_named(backend: str) -> None:
    """On gloo the others continue immediately, and wait for the two in their next call."""
    recorders = make_healthy_dumps(4, backend=backend)
    for recorder in recorders:
        root = recorder.rank in (0, 3)
        recorder.record_call(
            "gather", outputs=[[64]] * 4 if root else [], state="scheduled" if root else "completed"
        )
        if not root:
            recorder.record_call(state="scheduled")
    verdict = analyze_only(recorders)
    assert (verdict.kind, verdict.culprits, verdict.differing_fields) == (
        VerdictKind.MISMATCH,
        (0, 3),
        ("root",),
    )


def test_gloo_root_is_not_exited_because_others_are() -> None:
    recorders = make_healthy_dumps(3, backend="gloo")
    for recorder in recorders:
        recorder.record_call(
            "gather",
            outputs=[] if recorder.rank else [[64]] * 3,
            state="completed" if recorder.rank == 1 else "scheduled",
        )
    recorders[1].record_call(state="scheduled")
    assert (
        analyze_recorders(recorders).verdicts == ()
    )  # rank 0 waits for rank 2's data, which is in transit, not for a rank to enter


def test_gloo_outlier_that_continued_after_mismatch() -> None:
    """Rank 0 is the root of a broadcast, which returns before any rank has received it."""
    recorders = make_healthy_dumps(3, backend="gloo")
    for recorder in recorders:
        recorder.record_call(
            "barrier" if recorder.rank else "broadcast",
            inputs=[] if recorder.rank else [[64]],
            state="scheduled" if recorder.rank else "completed",
        )
    recorders[0].record_call("broadcast", state="scheduled")
    assert (
        analyze_only(recorders).kind,
        analyze_only(recorders).culprits,
        analyze_only(recorders).seq,
    ) == (
        VerdictKind.MISMATCH,
        (0,),
        6,
    )


def test_coalesced_calls_are_compared_as_one() -> None:
    even = [[4, 4], [4, 4]]
    recorders = make_healthy_dumps(3)
    for recorder in recorders:
        recorder.record_coalesced("broadcast", even)
        recorder.record_coalesced("_reduce_oop", even, end="REDUCE_SCATTER_coalesced")
    assert analyze_recorders(recorders).verdicts == ()
    for recorder in recorders:
        recorder.record_coalesced(
            "_broadcast_oop",
            [[4, 4], [5, 5]] if recorder.rank == 0 else even,
            end="ALLGATHER_coalesced",
            state="scheduled",
        )
    verdict = analyze_only(recorders)
    assert (verdict.kind, verdict.culprits, verdict.differing_fields) == (
        VerdictKind.MISMATCH,
        (0,),
        ("shape",),
    )
    assert {c.call.signature.op for c in verdict.calls} == {"all_gather"}


def test_coalesced_call_missing_on_one_rank() -> None:
    recorders = make_healthy_dumps(3)
    for recorder in recorders[1:]:
        recorder.record_coalesced(
            "_reduce_oop", [[4, 4], [4, 4]], end="REDUCE_SCATTER_coalesced", state="scheduled"
        )
    assert (
        analyze_only(recorders).kind,
        analyze_only(recorders).culprits,
        analyze_only(recorders).seq,
    ) == (
        VerdictKind.MISSING_RANK,
        (0,),
        6,
    )


def test_wait_chains_cross_groups() -> None:
    """Rank 0 waits for 1 in the world; 1 waits for 2 in a smaller group; only 2 is in no call."""
    recorders = make_healthy_dumps(3, pair=[1, 2])
    recorders[0].record_call(state="scheduled")
    recorders[1].record_call(group="pair", state="scheduled")
    verdict = analyze_only(recorders)
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.MISSING_RANK,
        (2,),
        (0, 1),
    )


def test_two_groups_entered_in_opposite_order_are_a_deadlock() -> None:
    recorders = make_healthy_dumps(2, a=[0, 1], b=[0, 1])
    recorders[0].record_call(group="a", state="scheduled")
    recorders[1].record_call(group="b", state="scheduled")
    assert (analyze_only(recorders).kind, analyze_only(recorders).culprits) == (
        VerdictKind.DEADLOCK,
        (0, 1),
    )


def test_groups_with_same_name_and_different_members_are_not_compared() -> None:
    recorders = [
        SyntheticRecorder(0, {"0": [0, 1], "1": [0]}),
        SyntheticRecorder(1, {"0": [0, 1], "1": [1]}),
    ]
    for recorder in recorders:
        recorder.record_call(group="1", inputs=[[recorder.rank + 5]])
    assert analyze_recorders(recorders).verdicts == ()


def test_sends_and_receives_are_matched_by_channel() -> None:
    recorders = make_healthy_dumps(3)
    for recorder in recorders:
        recorder.record_p2p("recv", (recorder.rank + 1) % 3, state="scheduled")
    assert (analyze_only(recorders).kind, analyze_only(recorders).culprits) == (
        VerdictKind.DEADLOCK,
        (0, 1, 2),
    )

    recorders = make_healthy_dumps(3)
    for _ in range(2):
        recorders[0].record_p2p("send", 1)
        recorders[1].record_p2p("recv", 0)
    recorders[1].record_p2p("recv", 0, state="scheduled")
    recorders[2].record_p2p("recv", 1, state="scheduled")
    verdict = analyze_only(recorders)
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.MISSING_RANK,
        (0,),
        (1, 2),
    )


def test_message_with_unexpected_size() -> None:
    recorders = make_healthy_dumps(2)
    recorders[0].record_p2p("send", 1, shape=[8], state="scheduled")
    recorders[1].record_p2p("recv", 0, shape=[4], state="scheduled")
    assert (
        analyze_only(recorders).kind,
        analyze_only(recorders).culprits,
        analyze_only(recorders).differing_fields,
    ) == (
        VerdictKind.MISMATCH,
        (0, 1),
        ("shape",),
    )


def test_rings_that_start_at_different_records() -> None:
    recorders = make_healthy_dumps(3, calls=20)
    for recorder in recorders:
        recorder.overwrite_oldest(4 * recorder.rank)
        recorder.record_call("broadcast" if recorder.rank == 0 else "all_reduce", state="scheduled")
    verdict = analyze_only(recorders)
    assert (verdict.kind, verdict.culprits, verdict.seq) == (VerdictKind.MISMATCH, (0,), 21)


def test_channels_with_overwritten_start() -> None:
    recorders = make_healthy_dumps(2, calls=3)
    for _ in range(9):
        recorders[0].record_p2p("send", 1)
        recorders[1].record_p2p("recv", 0)
    recorders[0].overwrite_oldest(6)
    recorders[1].overwrite_oldest(9)
    assert analyze_recorders(recorders).verdicts == ()
    recorders[1].record_p2p("recv", 0, state="scheduled")
    assert (analyze_only(recorders).kind, analyze_only(recorders).culprits) == (
        VerdictKind.MISSING_RANK,
        (0,),
    )


def test_rank_with_overwritten_calls_is_not_blamed() -> None:
    recorders = make_healthy_dumps(4, pair=[0, 1])
    for recorder in recorders[:2]:
        for _ in range(9):
            recorder.record_call(group="pair")
    recorders[0].has_status = False
    recorders[0].overwrite_oldest(5)
    recorders[3].record_call(state="scheduled")
    assert analyze_only(recorders).culprits == (1, 2)
    assert analyze_only([recorders[0], recorders[3]]).culprits == ()
    assert "rank 3 waits in all_reduce" in analyze_only([recorders[0], recorders[3]]).summary
    assert (
        "for ranks 0-2 (no record of that time)"
        in analyze_only([recorders[0], recorders[3]]).summary
    )


def test_gloo_group_members_are_unknown_when_one_rank_entered() -> None:
    recorders = make_healthy_dumps(3, backend="gloo", pair=[0, 1])
    recorders[0].record_call(group="pair", state="scheduled")
    assert analyze_recorders(recorders).verdicts == ()
    assert (
        "rank 0 may still be in all_reduce (call 1 of group mesh_pair)"
        in analyze_recorders(recorders).notes[-1]
    )


def test_victim_without_dump_is_not_blamed() -> None:
    recorders = make_healthy_dumps()
    for recorder in recorders:
        if recorder.rank != 2:
            recorder.record_call(state="scheduled")
    diagnosis = analyze_recorders(recorders[:3])
    assert [v.culprits for v in diagnosis.verdicts] == [(2,)]
    assert "no dump of rank 3: that is missing evidence" in diagnosis.notes[0]


def test_only_remaining_awaited_rank_has_no_dump() -> None:
    recorders = make_healthy_dumps()
    for recorder in recorders:
        recorder.record_call(state="scheduled")
    verdict = analyze_only(recorders[:3])
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.MISSING_RANK,
        (),
        (0, 1, 2),
    )
    assert (
        "ranks 0-2 wait in all_reduce (call 6 of group default_pg) for rank 3 (no dump)"
        in verdict.summary
    )


def test_healthy_job_with_a_missing_dump_has_no_verdict() -> None:
    assert analyze_recorders(make_healthy_dumps()[:3]).verdicts == ()


def test_dumps_of_unfinished_calls_only() -> None:
    """Dumps of ``dump_nccl_trace_json?onlyactive=true``: a rank that has completed all its calls
    lists none, only their number.
    """
    recorders = make_healthy_dumps(3)
    for recorder in recorders[:2]:
        recorder.record_call(state="started")
    for recorder in recorders:
        recorder.entries = [entry for entry in recorder.entries if entry["state"] != "completed"]
    verdict = analyze_only(recorders)
    assert (verdict.kind, verdict.culprits, verdict.seq) == (VerdictKind.MISSING_RANK, (2,), 6)


@pytest.mark.parametrize("version", ["2.1", "2.4", "2.5", "2.7", "2.9", "2.10"])
def test_every_dump_layout_since_torch_2_5_and_json(version: str) -> None:
    recorders = make_recorders(3, version=version)
    for recorder in recorders:
        recorder.record_call("broadcast" if recorder.rank == 1 else "all_reduce", state="scheduled")
        for entry in recorder.entries:
            for later in ("pg_id", "frames", "timeout_ms", "retired"):  # not in all of them
                del entry[later]
    diagnosis = analyze_dumps(
        [
            parse_dump(recorder.rank, json.loads(json.dumps(recorder.make_dump())))
            for recorder in recorders
        ]
    )
    assert [v.culprits for v in diagnosis.verdicts] == [(1,)]


@pytest.mark.parametrize(
    "data",
    [
        [],
        {"entries": []},
        {"version": "1.5", "pg_config": {}},
        {"version": "2.10", "pg_config": []},
        {"version": "2.10", "pg_config": {}, "entries": [{"record_id": 0}]},
        {"version": "2.10", "pg_config": {"0": {"ranks": "__import__('os')"}}, "entries": []},
        {"version": "2.10", "pg_config": {}, "entries": 7},
    ],
)
def test_invalid_dump_is_refused_with_reason(data: object) -> None:
    with pytest.raises(FlightDumpError, match=r"it has no|its layout|its entries"):
        parse_dump(0, data)
