"""Dumps of pipelines with a stopped stage: whatever evidence is lost, no other stage is named."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from hangwatch.flight_recorder.analysis import analyze_dumps
from hangwatch.flight_recorder.calls import parse_dump
from hangwatch.model.kinds import VerdictKind
from tests.simulation.flight_recorders import SyntheticRecorder, make_recorders
from tests.unit.server.ingest.test_fuzz import FUZZ_SETTINGS

STEP_COUNT, MICROBATCHES = 4, 3
StageCalls = list[tuple[str, int | None]]  # operation and peer; an all_reduce of all has none


def stage_program(stage: int, stages: int) -> StageCalls:
    """What a stage does: microbatches forward, then backward, then all_reduce."""
    before: list[int] = [stage - 1] if stage > 0 else []
    after: list[int] = [stage + 1] if stage < stages - 1 else []
    forward: StageCalls = [
        *(("recv", peer) for peer in before),
        *(("send", peer) for peer in after),
    ]
    backward: StageCalls = [
        *(("recv", peer) for peer in after),
        *(("send", peer) for peer in before),
    ]
    return (forward * MICROBATCHES + backward * MICROBATCHES + [("all_reduce", None)]) * STEP_COUNT


def run_pipeline(
    stages: int, outlier: int, stop_at: int, buffered: bool
) -> dict[int, list[tuple[str, int | None, str]]]:
    """The calls of each stage with their states, when no stage makes progress. ``buffered``: a send
    completes before it is received.
    """
    programs = {stage: stage_program(stage, stages) for stage in range(stages)}
    programs[outlier] = programs[outlier][: min(stop_at, len(programs[outlier]) - 1)]
    over = dict.fromkeys(programs, 0)
    entered: Counter[tuple[int, str, int | None]] = Counter()
    moved, begun = True, dict.fromkeys(programs, 0)
    while moved:
        moved = False
        for stage, calls in programs.items():
            if over[stage] == len(calls):
                continue
            op, peer = calls[over[stage]]
            if begun[stage] == over[stage]:
                begun[stage] += 1
                entered[stage, op, peer] += 1
                moved = True
            mine = entered[stage, op, peer]
            if op == "all_reduce":
                met = all(entered[other, op, None] >= mine for other in programs)
            else:
                met = (buffered and op == "send") or entered[
                    peer or 0, {"send": "recv", "recv": "send"}[op], stage
                ] >= mine
            if met:
                over[stage] += 1
                moved = True
    return {
        stage: [
            (*call, "completed" if at < over[stage] else "started")
            for at, call in enumerate(calls[: begun[stage]])
        ]
        for stage, calls in programs.items()
    }


def record_calls(
    one: SyntheticRecorder, calls: list[tuple[str, int | None, str]], batched: bool
) -> None:
    for op, peer, state in calls:
        if peer is None:
            one.record_call(state=state)
        elif batched:
            one.record_p2p_batch((op, peer, [8]), state=state)
        else:
            one.record_p2p(op, peer, state=state)


@FUZZ_SETTINGS
@given(
    stages=st.integers(2, 5), odd=st.integers(0, 4), stop=st.integers(0, 50), cuts=st.lists(st.integers(0, 60), min_size=5, max_size=5),
    lost=st.none() | st.integers(0, 4), batched=st.booleans(), timed=st.booleans(), buffered=st.booleans(), counts=st.booleans(),
    whole=st.booleans(),
)  # fmt: skip
def test_only_stopped_stage_is_named(
    stages: int,
    odd: int,
    stop: int,
    cuts: list[int],
    lost: int | None,
    batched: bool,
    timed: bool,
    buffered: bool,
    counts: bool,
    whole: bool,
) -> None:
    odd %= stages
    made = make_recorders(stages, timed=timed)
    for one, calls in zip(made, run_pipeline(stages, odd, stop, buffered).values(), strict=True):
        one.has_status = counts
        record_calls(one, calls, batched)
        if not whole:
            one.overwrite_oldest(min(cuts[one.rank], max(0, len(one.entries) - 1)))
    dumps = [parse_dump(one.rank, one.make_dump()) for one in made if whole or one.rank != lost]
    verdicts = analyze_dumps(dumps).verdicts
    assert all(set(verdict.culprits) <= {odd} for verdict in verdicts), [
        verdict.summary for verdict in verdicts
    ]
    if whole:
        assert [(verdict.kind, verdict.culprits) for verdict in verdicts] == [
            (VerdictKind.MISSING_RANK, (odd,))
        ]
