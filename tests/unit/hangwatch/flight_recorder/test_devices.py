"""Devices that lag, from Flight Recorder dumps: real ones, and synthetic ones of larger jobs."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from hangwatch.flight_recorder.analysis import OfflineDiagnosis, analyze_dumps
from hangwatch.flight_recorder.calls import parse_dump
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.verdicts import Verdict
from tests.simulation.flight_recorders import SyntheticRecorder, make_recorders

DUMPS_DIR = Path(__file__).parents[3] / "fakegpu" / "dumps"
VERSIONS = ("torch-2.9.1", "torch-2.14.1")
WORLD_SIZE = 16
PAIR_COUNT = WORLD_SIZE // 2


def analyze_folder(folder: Path) -> OfflineDiagnosis:
    """The dumps are the project's own, so that unpickling them is safe."""
    dumps = []
    for path in sorted(folder.glob("rank_*")):
        rank = int(path.name.removeprefix("rank_"))
        dumps.append(parse_dump(rank, pickle.loads(path.read_bytes())))
    return analyze_dumps(dumps)


def analyze_active_entries(recorders: list[SyntheticRecorder]) -> Verdict:
    """The only verdict on dumps of calls that are not complete, without stacks."""
    dumps = []
    for recorder in recorders:
        dump = recorder.make_dump()
        active = [entry for entry in dump["entries"] if entry["state"] != "completed"]
        dump["entries"] = [{**entry, "frames": []} for entry in active]
        dumps.append(parse_dump(recorder.rank, dump))
    verdicts = analyze_dumps(dumps).verdicts
    assert len(verdicts) == 1, [verdict.summary for verdict in verdicts]
    return verdicts[0]


def make_parallel_recorders(*, timed: bool = False) -> list[SyntheticRecorder]:
    """Tensor-parallel pairs and two data-parallel groups; all have completed 10 steps."""
    groups: dict[str, Any] = {}
    for number in range(PAIR_COUNT):
        groups[str(number + 1)] = [2 * number, 2 * number + 1]
    for parity in (0, 1):
        groups[str(PAIR_COUNT + 1 + parity)] = list(range(parity, WORLD_SIZE, 2))
    recorders = make_recorders(WORLD_SIZE, timed=timed, **groups)
    for recorder in recorders:
        for _ in range(10):
            record_step(recorder, "completed", "completed")
    return recorders


def get_groups(rank: int) -> tuple[str, str]:
    """The names of its pair and of its data-parallel group."""
    return str(rank // 2 + 1), str(PAIR_COUNT + 1 + rank % 2)


def record_step(recorder: SyntheticRecorder, pair_state: str, data_state: str) -> None:
    pair, data = get_groups(recorder.rank)
    recorder.record_call("all_gather", group=pair, state=pair_state)
    recorder.record_call("all_reduce", group=data, state=data_state)


@pytest.mark.parametrize("version", VERSIONS)
def test_device_that_has_not_begun_is_named(version: str) -> None:
    (verdict,) = analyze_folder(DUMPS_DIR / version / "endless_kernel-timing").verdicts
    assert (verdict.kind, verdict.culprits, verdict.waiting, verdict.seq) == (
        VerdictKind.DEVICE_STUCK,
        (1,),
        (0, 2, 3),
        6,
    )
    assert verdict.group is not None and verdict.group.desc == "default_pg"
    assert "has queued all_reduce" in verdict.summary
    assert "its device has not begun it" in verdict.summary


@pytest.mark.parametrize("version", VERSIONS)
def test_stall_of_all_devices_names_no_rank(version: str) -> None:
    (verdict,) = analyze_folder(DUMPS_DIR / version / "stall-timing").verdicts
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.NO_PROGRESS,
        (),
        (0, 1, 2, 3),
    )
    assert "TORCH_NCCL_ENABLE_TIMING" not in verdict.advice


@pytest.mark.parametrize("version", VERSIONS)
def test_advice_without_timing_names_the_setting(version: str) -> None:
    (verdict,) = analyze_folder(DUMPS_DIR / version / "endless_kernel-no-timing").verdicts
    assert (verdict.kind, verdict.culprits) == (VerdictKind.NO_PROGRESS, ())
    assert "TORCH_NCCL_ENABLE_TIMING=1" in verdict.advice


def test_pair_behind_parallel_pairs_is_named_without_timing() -> None:
    recorders = make_parallel_recorders()
    for recorder in recorders:
        pair_state = "scheduled" if recorder.rank in (6, 7) else "completed"
        record_step(recorder, pair_state, "scheduled")
    verdict = analyze_active_entries(recorders)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEVICE_STUCK, (6, 7))
    assert verdict.waiting == tuple(r for r in range(WORLD_SIZE) if r not in (6, 7))
    assert verdict.seq == 11
    assert "not entered" not in verdict.summary + verdict.advice


def test_hosts_ahead_do_not_hide_device_behind() -> None:
    """Hosts queue further steps, by different numbers, while two devices of one group are behind."""
    recorders = make_parallel_recorders()
    for recorder in recorders:
        data = get_groups(recorder.rank)[1]
        for call in range(12):
            is_behind = recorder.rank in (2, 10) and call >= 0
            state = "scheduled" if is_behind else "completed"
            recorder.record_call("broadcast", group=data, state=state)
        for _ in range(3 + recorder.rank % 4):
            recorder.record_call("all_reduce", group=data, state="scheduled")
    recorders = [recorder for recorder in recorders if recorder.rank % 2 == 0]
    verdict = analyze_active_entries(recorders)
    assert (verdict.kind, verdict.culprits, verdict.seq) == (VerdictKind.DEVICE_STUCK, (2, 10), 11)
    assert "as other devices have" in verdict.summary


def test_chain_across_groups_leads_to_device_that_has_not_begun() -> None:
    """Timing shows that rank 7 has begun nothing; rank 6 waits for it in their pair."""
    recorders = make_parallel_recorders(timed=True)
    for recorder in recorders:
        if recorder.rank == 7:
            record_step(recorder, "scheduled", "scheduled")
        elif recorder.rank == 6:
            record_step(recorder, "started", "scheduled")
        else:
            record_step(recorder, "completed", "started")
    verdict = analyze_active_entries(recorders)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEVICE_STUCK, (7,))
    assert len(verdict.waiting) == WORLD_SIZE - 1


def test_missing_host_stays_missing_rank_without_second_verdict() -> None:
    recorders = make_parallel_recorders()
    for recorder in recorders:
        if recorder.rank != 7:
            pair_state = "scheduled" if recorder.rank == 6 else "completed"
            record_step(recorder, pair_state, "scheduled")
    verdict = analyze_active_entries(recorders)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.MISSING_RANK, (7,))


def test_stalled_pair_is_root_of_chain() -> None:
    recorders = make_parallel_recorders(timed=True)
    for recorder in recorders:
        if recorder.rank in (6, 7):
            record_step(recorder, "started", "scheduled")
        else:
            record_step(recorder, "completed", "started")
    verdict = analyze_active_entries(recorders)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.NO_PROGRESS, ())
    assert verdict.group is not None and verdict.group.ranks == (6, 7)
    assert len(verdict.waiting) == WORLD_SIZE


def test_status_is_believed_over_newest_entry() -> None:
    """A host that is blocked by a full queue has an entry that seems complete."""
    recorders = make_recorders(4, timed=True)
    for recorder in recorders:
        recorder.record_call()
        recorder.record_call(state="scheduled" if recorder.rank == 1 else "started")
        for _ in range(5):
            recorder.record_call(state="scheduled")
        status = recorder.make_status("0")
        recorder.record_call(state="completed")
        recorder.fixed_status["0"] = {**status, "last_enqueued_collective": 8}
    dumps = [parse_dump(recorder.rank, recorder.make_dump()) for recorder in recorders]
    (verdict,) = analyze_dumps(dumps).verdicts
    assert (verdict.kind, verdict.culprits, verdict.seq) == (VerdictKind.DEVICE_STUCK, (1,), 2)
