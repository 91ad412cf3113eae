"""Where the counters of a group are, and how torch's text of them is read."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C import _distributed_c10d

from hangwatch.agent.recorder import device
from hangwatch.agent.recorder.device import (
    OWN_RECORDER,
    CounterKey,
    count_attached_hooks,
    find_counter_key,
    read_flight_recorders,
)
from hangwatch.ring.layout import DeviceStatusState


class FakeGroup:
    def __init__(self, backend: object) -> None:
        self.backend = backend

    def _get_backend(self, device: object) -> object:
        if self.backend is None:
            raise RuntimeError("no backend for this device")
        return self.backend


class FakeHook:
    @staticmethod
    def attach(pg: object, global_ranks: object = ()) -> object:
        if pg is None:
            raise RuntimeError("null process group")
        return FakeHook()


NCCL2 = SimpleNamespace(name=lambda: "nccl2")


@pytest.fixture
def hook_class(monkeypatch: pytest.MonkeyPatch) -> type[FakeHook]:
    """A torch whose Flight Recorder works by hooks, which are counted."""
    monkeypatch.setattr(FakeHook, "attach", FakeHook.__dict__["attach"])  # restored after the test
    monkeypatch.setattr(_distributed_c10d, "FlightRecorderHook", FakeHook, raising=False)
    monkeypatch.setattr(torch, "__version__", "2.15.0+cu130")
    monkeypatch.setattr(device, "_next_number", iter(range(9)))
    count_attached_hooks()
    return FakeHook


def make_dump(status: dict[str, tuple[int, int, int]]) -> bytes:
    names = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")
    groups = {
        number: dict(zip(names, map(str, counts), strict=True)) for number, counts in status.items()
    }
    return json.dumps({"pg_config": {"0": {}}, "pg_status": groups}).encode()


def test_own_recorder_numbers_groups_by_their_backend() -> None:
    group = FakeGroup(SimpleNamespace(uid=3))
    assert find_counter_key(group) == CounterKey(OWN_RECORDER, "3")


def test_hooks_are_numbered_in_the_order_of_their_attachment(hook_class: type[FakeHook]) -> None:
    first, second = FakeGroup(NCCL2), FakeGroup(NCCL2)
    hook_class.attach(first, [0, 1])
    with pytest.raises(RuntimeError):
        hook_class.attach(None)
    hook_class.attach(second)
    assert find_counter_key(first) == CounterKey("nccl2", "0")
    assert find_counter_key(second) == CounterKey("nccl2", "2")


def test_hooks_are_counted_once(hook_class: type[FakeHook]) -> None:
    count_attached_hooks()
    group = FakeGroup(NCCL2)
    hook_class.attach(group)
    assert find_counter_key(group) == CounterKey("nccl2", "0")


def test_group_without_a_hook_lacks_the_buffer(hook_class: type[FakeHook]) -> None:
    assert find_counter_key(FakeGroup(NCCL2)) is DeviceStatusState.OFF


def test_older_torch_has_no_counters_of_such_backends(
    hook_class: type[FakeHook], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.14.1")
    assert find_counter_key(FakeGroup(NCCL2)) is DeviceStatusState.UNSUPPORTED


def test_group_without_a_backend_for_devices_has_no_counters() -> None:
    assert find_counter_key(FakeGroup(None)) is DeviceStatusState.UNSUPPORTED


def test_calls_are_numbered_from_one_in_every_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    def dump_own(includeCollectives: bool) -> bytes:
        return make_dump({"0": (2, 1, 1), "1": (1, -1, -1)})

    def dump_hooked(backend: str, **options: Any) -> bytes:
        assert backend == "nccl2"
        return make_dump({"0": (1, -1, 0), "1": (0, -1, -1)})

    monkeypatch.setattr(_distributed_c10d, "_dump_nccl_trace_json", dump_own, raising=False)
    monkeypatch.setattr(_distributed_c10d, "_dump_fr_trace_json", dump_hooked, raising=False)
    status = read_flight_recorders([OWN_RECORDER, "nccl2"])
    assert status.is_enabled
    assert not status.queried_communicators
    assert status.counters == {
        CounterKey(OWN_RECORDER, "0"): (2, 1, 1),
        CounterKey(OWN_RECORDER, "1"): (1, -1, -1),
        CounterKey("nccl2", "0"): (2, None, 1),
        CounterKey("nccl2", "1"): (1, None, -1),
    }
