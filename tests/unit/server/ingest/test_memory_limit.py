"""What a server does once it uses as much memory as it may."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hangwatch.protocol import heartbeat
from hangwatch.server.core import limits
from hangwatch.server.core.memory import read_resident_bytes
from hangwatch.server.core.problems import Problem
from hangwatch.server.ingest.heartbeat_checks import check_memory
from hangwatch.tracking.fleet import Fleet


def make_heartbeat(pid: int, number: int = 1) -> heartbeat.Heartbeat:
    identity = heartbeat.ProcessIdentity(job="j", rank=pid, world_size=2, pid=pid, start_ticks=1)
    update = heartbeat.ProcessUpdate(key=f"{pid}-1", identity=identity)
    return heartbeat.Heartbeat(host="n", agent="a", number=number, processes=(update,))


def test_known_processes_are_reported_and_new_ones_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Fleet()
    known = make_heartbeat(pid=1)
    check_memory(known, fleet, False, 0)
    fleet.apply_heartbeat(known, 1.0)
    monkeypatch.setattr(limits, "MEMORY", replace(limits.MEMORY, most=read_resident_bytes() // 2))
    check_memory(make_heartbeat(pid=1, number=2), fleet, True, 1)
    with pytest.raises(Problem, match="of a server's memory") as refusal:
        check_memory(make_heartbeat(pid=2, number=3), fleet, True, 1)
    assert refusal.value.status == limits.MEMORY.status
