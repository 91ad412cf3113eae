"""The diagnosis from Flight Recorder dumps alone."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest

from hangwatch.flight_recorder.analysis import OfflineDiagnosis, analyze_dumps
from hangwatch.flight_recorder.dumps import FlightDumpError, parse_dump
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.verdicts import Verdict
from tests.simulation.flight_recorders import SyntheticRecorder, make_recorders


def analyze_recorders(made: Iterable[SyntheticRecorder]) -> OfflineDiagnosis:
    return analyze_dumps([parse_dump(one.rank, one.make_dump()) for one in made])


def analyze_only(made: Iterable[SyntheticRecorder]) -> Verdict:
    verdicts = analyze_recorders(made).verdicts
    assert len(verdicts) == 1, [v.summary for v in verdicts]
    return verdicts[0]


def make_healthy_dumps(
    ranks: int = 4, backend: str = "nccl", calls: int = 5, **groups: list[int]
) -> list[SyntheticRecorder]:
    made = make_recorders(ranks, backend=backend, version="2.10", timed=False, **groups)
    for one in made:
        for _ in range(calls):
            one.record_call()
    return made


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("odd", [0, 2])
def test_outlier_is_named_even_if_rank_0(backend: str, odd: int) -> None:
    made = make_healthy_dumps(backend=backend)
    for one in made:
        one.record_call(
            "broadcast" if one.rank == odd else "all_reduce", state="scheduled", line=30 + one.rank
        )
    found = analyze_only(made)
    assert (found.kind, found.culprits, found.differing_fields, found.seq) == (
        VerdictKind.MISMATCH,
        (odd,),
        ("op",),
        6,
    )
    assert found.site is not None
    assert (found.site.file, found.site.line, found.site.function) == (
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
def test_a_difference_in_shape_or_dtype(fields: tuple[str, ...], odd: dict[str, object]) -> None:
    made = make_healthy_dumps()
    for one in made:
        call = {"op": odd.get("op", "all_reduce"), **(odd if one.rank == 1 else {})}
        one.record_call(state="scheduled", **call)  # type: ignore[arg-type]
    found = analyze_only(made)
    assert (found.kind, found.culprits, found.differing_fields) == (
        VerdictKind.MISMATCH,
        (1,),
        fields,
    )


def test_allowed_differences_are_no_mismatch() -> None:
    made = make_healthy_dumps()
    for one in made:
        root = one.rank == 0
        one.record_call("gather", outputs=[[64]] * 4 if root else [])
        one.record_call("scatter", inputs=[[64]] * 4 if root else [], outputs=[[64]])
        one.record_call("all_gather", inputs=[[one.rank + 1]], outputs=[[1], [2], [3], [4]])
        one.record_call("all_to_all", inputs=[[10 + one.rank]], outputs=[[13 - one.rank]])
        one.record_call("all_reduce_barrier", inputs=[[1]])
    assert analyze_recorders(made).verdicts == ()


def test_oversized_message_blames_sender() -> None:
    made = make_healthy_dumps()
    for one in made:
        one.record_call(
            "all_to_all", inputs=[[12 if one.rank == 2 else 8]], outputs=[[8]], state="scheduled"
        )
    found = analyze_only(made)
    assert (found.kind, found.culprits, found.differing_fields) == (
        VerdictKind.MISMATCH,
        (2,),
        ("splits",),
    )


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_missing_rank_is_reported_with_last_call(backend: str) -> None:
    made = make_healthy_dumps(backend=backend)
    for one in made:
        if one.rank != 2:
            one.record_call(state="scheduled")
    found = analyze_only(made)
    assert (found.kind, found.culprits, found.waiting, found.seq) == (
        VerdictKind.MISSING_RANK,
        (2,),
        (0, 1, 3),
        6,
    )
    assert "last seen in all_reduce at train.py:10" in found.advice


def test_rank_without_calls_is_missing() -> None:
    made = make_recorders(3)
    for one in made[:2]:
        one.record_call(state="scheduled")
    assert (analyze_only(made).kind, analyze_only(made).culprits) == (
        VerdictKind.MISSING_RANK,
        (2,),
    )
    assert "contains no calls" in " ".join(analyze_recorders(made).notes)


def test_calls_queued_behind_an_unfinished_one_blame_nobody() -> None:
    """Ranks may run ahead of their device by different numbers of calls: what is missing is missing
    in the first unfinished one.
    """
    made = make_healthy_dumps(3)
    for one in made[:2]:
        for _ in range(3 - one.rank):
            one.record_call(state="scheduled")
    found = analyze_only(made)
    assert (found.culprits, found.seq) == ((2,), 6)


def test_same_call_unfinished_on_all_ranks() -> None:
    made = make_healthy_dumps()
    for one in made:
        one.record_call(state="started")
    assert (analyze_only(made).kind, analyze_only(made).culprits) == (VerdictKind.NO_PROGRESS, ())


def test_call_completed_by_some_before_dump_is_no_hang() -> None:
    made = make_healthy_dumps()
    for one in made:
        one.record_call(state="completed" if one.rank else "started")
    assert analyze_recorders(made).verdicts == ()


def test_unretired_gloo_call_is_no_hang() -> None:
    made = make_healthy_dumps(3, backend="gloo")
    for one in made:
        one.record_call(state="completed" if one.rank == 1 else "scheduled")
    assert analyze_recorders(made).verdicts == ()
    for one in made[:2]:
        one.record_call(state="scheduled")
    assert (analyze_only(made).kind, analyze_only(made).culprits) == (
        VerdictKind.MISSING_RANK,
        (2,),
    )


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_two_roots_of_one_gather(backend: str) -> None:
    """On gloo the others go on at once, and wait for the two in their next call."""
    made = make_healthy_dumps(4, backend=backend)
    for one in made:
        root = one.rank in (0, 3)
        one.record_call(
            "gather", outputs=[[64]] * 4 if root else [], state="scheduled" if root else "completed"
        )
        if not root:
            one.record_call(state="scheduled")
    found = analyze_only(made)
    assert (found.kind, found.culprits, found.differing_fields) == (
        VerdictKind.MISMATCH,
        (0, 3),
        ("root",),
    )


def test_gloo_root_is_not_exited_because_others_are() -> None:
    made = make_healthy_dumps(3, backend="gloo")
    for one in made:
        one.record_call(
            "gather",
            outputs=[] if one.rank else [[64]] * 3,
            state="completed" if one.rank == 1 else "scheduled",
        )
    made[1].record_call(state="scheduled")
    assert (
        analyze_recorders(made).verdicts == ()
    )  # rank 0 waits for rank 2's part, which is on its way: not for somebody's arrival


def test_gloo_outlier_that_continued_after_mismatch() -> None:
    """Rank 0 is the root of a broadcast, which it can leave though nobody receives it."""
    made = make_healthy_dumps(3, backend="gloo")
    for one in made:
        one.record_call(
            "barrier" if one.rank else "broadcast",
            inputs=[] if one.rank else [[64]],
            state="scheduled" if one.rank else "completed",
        )
    made[0].record_call("broadcast", state="scheduled")
    assert (analyze_only(made).kind, analyze_only(made).culprits, analyze_only(made).seq) == (
        VerdictKind.MISMATCH,
        (0,),
        6,
    )


def test_coalesced_calls_are_compared_as_one() -> None:
    even = [[4, 4], [4, 4]]
    made = make_healthy_dumps(3)
    for one in made:
        one.record_coalesced("broadcast", even)
        one.record_coalesced("_reduce_oop", even, end="REDUCE_SCATTER_coalesced")
    assert analyze_recorders(made).verdicts == ()
    for one in made:
        one.record_coalesced(
            "_broadcast_oop",
            [[4, 4], [5, 5]] if one.rank == 0 else even,
            end="ALLGATHER_coalesced",
            state="scheduled",
        )
    found = analyze_only(made)
    assert (found.kind, found.culprits, found.differing_fields) == (
        VerdictKind.MISMATCH,
        (0,),
        ("shape",),
    )
    assert {c.call.signature.op for c in found.calls} == {"all_gather"}


def test_coalesced_call_missing_on_one_rank() -> None:
    made = make_healthy_dumps(3)
    for one in made[1:]:
        one.record_coalesced(
            "_reduce_oop", [[4, 4], [4, 4]], end="REDUCE_SCATTER_coalesced", state="scheduled"
        )
    assert (analyze_only(made).kind, analyze_only(made).culprits, analyze_only(made).seq) == (
        VerdictKind.MISSING_RANK,
        (0,),
        6,
    )


def test_wait_chains_cross_groups() -> None:
    """Rank 0 waits for 1 in the world; 1 waits for 2 in a smaller group; only 2 is elsewhere."""
    made = make_healthy_dumps(3, pair=[1, 2])
    made[0].record_call(state="scheduled")
    made[1].record_call(group="pair", state="scheduled")
    found = analyze_only(made)
    assert (found.kind, found.culprits, found.waiting) == (VerdictKind.MISSING_RANK, (2,), (0, 1))


def test_two_groups_entered_in_opposite_order_are_a_deadlock() -> None:
    made = make_healthy_dumps(2, a=[0, 1], b=[0, 1])
    made[0].record_call(group="a", state="scheduled")
    made[1].record_call(group="b", state="scheduled")
    assert (analyze_only(made).kind, analyze_only(made).culprits) == (VerdictKind.DEADLOCK, (0, 1))


def test_groups_with_same_name_and_different_members_are_not_compared() -> None:
    made = [
        SyntheticRecorder(0, {"0": [0, 1], "1": [0]}),
        SyntheticRecorder(1, {"0": [0, 1], "1": [1]}),
    ]
    for one in made:
        one.record_call(group="1", inputs=[[one.rank + 5]])
    assert analyze_recorders(made).verdicts == ()


def test_sends_and_receives_are_matched_by_channel() -> None:
    made = make_healthy_dumps(3)
    for one in made:
        one.record_p2p("recv", (one.rank + 1) % 3, state="scheduled")
    assert (analyze_only(made).kind, analyze_only(made).culprits) == (
        VerdictKind.DEADLOCK,
        (0, 1, 2),
    )

    made = make_healthy_dumps(3)
    for _ in range(2):
        made[0].record_p2p("send", 1)
        made[1].record_p2p("recv", 0)
    made[1].record_p2p("recv", 0, state="scheduled")
    made[2].record_p2p("recv", 1, state="scheduled")
    found = analyze_only(made)
    assert (found.kind, found.culprits, found.waiting) == (VerdictKind.MISSING_RANK, (0,), (1, 2))


def test_message_with_unexpected_size() -> None:
    made = make_healthy_dumps(2)
    made[0].record_p2p("send", 1, shape=[8], state="scheduled")
    made[1].record_p2p("recv", 0, shape=[4], state="scheduled")
    assert (
        analyze_only(made).kind,
        analyze_only(made).culprits,
        analyze_only(made).differing_fields,
    ) == (
        VerdictKind.MISMATCH,
        (0, 1),
        ("shape",),
    )


def test_rings_that_start_at_different_records() -> None:
    made = make_healthy_dumps(3, calls=20)
    for one in made:
        one.overwrite_oldest(4 * one.rank)
        one.record_call("broadcast" if one.rank == 0 else "all_reduce", state="scheduled")
    found = analyze_only(made)
    assert (found.kind, found.culprits, found.seq) == (VerdictKind.MISMATCH, (0,), 21)


def test_channels_with_overwritten_start() -> None:
    made = make_healthy_dumps(2, calls=3)
    for _ in range(9):
        made[0].record_p2p("send", 1)
        made[1].record_p2p("recv", 0)
    made[0].overwrite_oldest(6)
    made[1].overwrite_oldest(9)
    assert analyze_recorders(made).verdicts == ()
    made[1].record_p2p("recv", 0, state="scheduled")
    assert (analyze_only(made).kind, analyze_only(made).culprits) == (
        VerdictKind.MISSING_RANK,
        (0,),
    )


def test_rank_with_overwritten_calls_is_not_blamed() -> None:
    made = make_healthy_dumps(4, pair=[0, 1])
    for one in made[:2]:
        for _ in range(9):
            one.record_call(group="pair")
    made[0].has_status = False
    made[0].overwrite_oldest(5)
    made[3].record_call(state="scheduled")
    assert analyze_only(made).culprits == (1, 2)
    assert analyze_only([made[0], made[3]]).culprits == ()
    assert "rank 3 waits in all_reduce" in analyze_only([made[0], made[3]]).summary
    assert "for ranks 0-2 (no record of that time)" in analyze_only([made[0], made[3]]).summary


def test_gloo_group_members_are_unknown_when_one_rank_entered() -> None:
    made = make_healthy_dumps(3, backend="gloo", pair=[0, 1])
    made[0].record_call(group="pair", state="scheduled")
    assert analyze_recorders(made).verdicts == ()
    assert (
        "rank 0 may still be in all_reduce (call 1 of group mesh_pair)"
        in analyze_recorders(made).notes[-1]
    )


def test_victim_without_dump_is_not_blamed() -> None:
    made = make_healthy_dumps()
    for one in made:
        if one.rank != 2:
            one.record_call(state="scheduled")
    found = analyze_recorders(made[:3])
    assert [v.culprits for v in found.verdicts] == [(2,)]
    assert found.missing_ranks == (3,)
    assert "missing evidence" in found.notes[0]


def test_only_remaining_awaited_rank_has_no_dump() -> None:
    made = make_healthy_dumps()
    for one in made:
        one.record_call(state="scheduled")
    found = analyze_only(made[:3])
    assert (found.kind, found.culprits, found.waiting) == (VerdictKind.MISSING_RANK, (), (0, 1, 2))
    assert (
        "ranks 0-2 wait in all_reduce (call 6 of group default_pg) for rank 3 (no dump)"
        in found.summary
    )


def test_a_healthy_job_with_a_dump_missing() -> None:
    assert analyze_recorders(make_healthy_dumps()[:3]).verdicts == ()


def test_dumps_of_unfinished_calls_only() -> None:
    """As ``dump_nccl_trace_json?onlyactive=true`` answers: whoever is through with all calls has
    none, but a count of them.
    """
    made = make_healthy_dumps(3)
    for one in made[:2]:
        one.record_call(state="started")
    for one in made:
        one.entries = [entry for entry in one.entries if entry["state"] != "completed"]
    found = analyze_only(made)
    assert (found.kind, found.culprits, found.seq) == (VerdictKind.MISSING_RANK, (2,), 6)


@pytest.mark.parametrize("version", ["2.1", "2.4", "2.5", "2.7", "2.9", "2.10"])
def test_every_dump_layout_since_torch_2_5_and_json(version: str) -> None:
    made = make_recorders(3, version=version)
    for one in made:
        one.record_call("broadcast" if one.rank == 1 else "all_reduce", state="scheduled")
        for entry in one.entries:
            for later in ("pg_id", "frames", "timeout_ms", "retired"):  # not in all of them
                del entry[later]
    told = analyze_dumps(
        [parse_dump(one.rank, json.loads(json.dumps(one.make_dump()))) for one in made]
    )
    assert [v.culprits for v in told.verdicts] == [(1,)]


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
