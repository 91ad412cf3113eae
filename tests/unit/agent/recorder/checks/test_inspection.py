"""The reports of consecutive nonfinite calls: the first ones, then samples, then that it lasts; and
what a round is.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch.amp.grad_scaler import GradScaler

from hangwatch.agent.recorder.checks.inspection import CallChecker, CheckedCall
from hangwatch.agent.recorder.checks.settings import CheckSettings
from hangwatch.agent.recorder.writer import RingWriter
from hangwatch.model.limits import PERSISTENT_ROUNDS
from hangwatch.ring import checks
from hangwatch.ring.checks import CheckEntry
from hangwatch.ring.layout import CheckFlag
from hangwatch.ring.reader import RingReader


class CheckRecorder:
    """A recorder's checks, and what they wrote."""

    def __init__(self, folder: Path) -> None:
        self.ring = RingWriter(
            folder / "a.ring",
            pid=os.getpid(),
            start_ticks=1,
            has_checks=True,
        )
        self.checks = CallChecker(self.ring, CheckSettings(nonfinite=True))

    def record_call(
        self,
        seq: int,
        *,
        nan: int = 0,
        inf: int = 0,
        dtype: torch.dtype = torch.float32,
        signature: int = 1,
        at_s: float = 0.0,
    ) -> None:
        call = CheckedCall(
            entered_ns=int((1000 + at_s) * 1e9),
            seq=seq,
            chain=seq,
            size=4,
            uid=1,
            signature=signature,
            site=0,
            flags=1,
        )
        self.checks.nonfinite.record_call(
            call, nan, inf, [torch.ones(1, dtype=dtype)], output=False, is_sampled=False
        )

    def list_entries(self) -> list[CheckEntry]:
        return checks.read_check_entries(RingReader(self.ring.map))[0]


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckRecorder:
    for name in ("__init__", "update"):
        monkeypatch.setattr(
            GradScaler, name, getattr(GradScaler, name)
        )  # as they are, to be put back
    return CheckRecorder(tmp_path)


def test_nonfinite_run_is_reported_at_start_and_periodically(seen: CheckRecorder) -> None:
    for seq in range(10, 500):
        seen.record_call(seq, nan=1, at_s=(seq - 10) * 0.1)
    assert [e.seq for e in seen.list_entries()] == [10, 11, 312]
    assert {e.first for e in seen.list_entries()} == {10} and not any(
        e.flags & CheckFlag.SCALED for e in seen.list_entries()
    )


def test_finite_call_of_same_kind_ends_run(seen: CheckRecorder) -> None:
    seen.record_call(1, nan=1)
    seen.record_call(2)
    seen.record_call(3, nan=1)
    seen.record_call(4, nan=1, signature=2)
    seen.record_call(5, signature=2)
    seen.record_call(6, nan=1)
    assert [(e.seq, e.first) for e in seen.list_entries()] == [(1, 1), (3, 3), (4, 4), (6, 3)]


def test_rounds_follow_grad_scaler(seen: CheckRecorder) -> None:
    GradScaler("cpu", enabled=False)
    assert not seen.checks.nonfinite.scaling.is_active
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.step()
    assert seen.checks.nonfinite.scaling.rounds == 1
    scaler = GradScaler("cpu")
    assert seen.checks.nonfinite.scaling.is_active
    scaler.scale(torch.ones(1, requires_grad=True).sum()).backward()
    optimizer.param_groups[0]["params"][0].grad = torch.tensor([float("inf")])
    before = scaler.get_scale()
    for _ in range(3):
        scaler.step(optimizer)
        scaler.update()
    assert seen.checks.nonfinite.scaling.rounds == 4 and scaler.get_scale() < before, (
        "the scaler works as without us"
    )


def test_with_loss_scaling_only_lasting_runs_are_reported(seen: CheckRecorder) -> None:
    GradScaler("cpu")
    for seq in range(10, 10 + 3 * PERSISTENT_ROUNDS):
        seen.record_call(seq, inf=2)
        seen.checks.nonfinite.scaling.rounds += 1
    entries = seen.list_entries()
    assert [(e.seq, e.rounds, e.overflows) for e in entries] == [
        (10, 0, 1),
        (11, 1, 2),
        (10 + PERSISTENT_ROUNDS, PERSISTENT_ROUNDS, PERSISTENT_ROUNDS + 1),
    ]
    assert all(e.flags & CheckFlag.SCALED for e in entries)


def test_half_precision_run_lasts_without_countable_rounds(seen: CheckRecorder) -> None:
    for seq in range(1, 2100):
        seen.record_call(seq, inf=1, dtype=torch.float16)
    assert [(e.seq, e.rounds >= PERSISTENT_ROUNDS) for e in seen.list_entries()] == [
        (1, False),
        (2, False),
        (2048, True),
    ]
