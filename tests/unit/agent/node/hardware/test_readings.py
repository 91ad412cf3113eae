"""What changed between two readings of the sources."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

from hangwatch.agent.node.hardware.monitor import (
    MAX_BASELINES,
    HardwareMonitor,
    HardwareOrder,
    find_changes,
)
from hangwatch.agent.node.hardware.reader import Reading, Source
from hangwatch.model.hardware import Observation, Weight
from hangwatch.protocol.commands import Command, CommandKind

SECOND_NS = 1_000_000_000


def observe(what: str, now: int | str, **flags: object) -> Observation:
    return Observation(source="s", about="a", what=what, now=now, **flags)  # type: ignore[arg-type]


FOUND = Observation(source="job", about="a", what="sxid", now=0, is_abnormal=True)


def read(at_s: float, *observations: Observation) -> Reading:
    return Reading(taken_ns=int(at_s * SECOND_NS), observations=observations)


def test_only_changes_and_what_is_abnormal_are_reported() -> None:
    baseline = read(1, observe("errors", 5), observe("drops", 2), observe("state", "up"))
    reading = read(
        11,
        observe("errors", 5),
        observe("drops", 9),
        observe("state", "down", weight=Weight.FAULT),
        observe("xid", "79", weight=Weight.FAULT, is_abnormal=True),
        observe("version", "2.27", weight=Weight.FACT),
        observe("new", 7),
    )
    changes = find_changes(reading, [baseline], onset_ns=5 * SECOND_NS)
    assert [(o.what, o.before, o.now) for o in changes] == [
        ("state", "up", "down"),
        ("xid", None, "79"),
        ("drops", 2, 9),
        ("version", None, "2.27"),
    ]


def test_compared_with_the_last_reading_before_the_onset() -> None:
    counted = ((60, 0), (120, 1), (180, 8))
    baselines = [read(at_s, observe("errors", errors)) for at_s, errors in counted]
    now = read(200, observe("errors", 8))
    (change,) = find_changes(now, baselines, onset_ns=150 * SECOND_NS)
    assert (change.before, change.now) == (1, 8)
    (change,) = find_changes(now, baselines, onset_ns=10 * SECOND_NS)
    assert change.before == 0, "all readings are later than the onset"


def test_without_an_earlier_reading_only_what_is_abnormal_is_reported() -> None:
    reading = read(9, observe("errors", 5), observe("xid", "79", is_abnormal=True))
    changes = find_changes(reading, [], onset_ns=0)
    assert [o.what for o in changes] == ["xid"]


def test_number_of_baselines_is_bounded() -> None:
    numbers = itertools.count(1)
    source = Source(name="s", probe=lambda _: [observe("errors", next(numbers))], has_counters=True)
    monitor = HardwareMonitor(lambda: None, sources=[source])
    for _ in range(MAX_BASELINES + 10):
        assert monitor.execute_order(HardwareOrder(pids=())) is None
    command = Command(id="r", kind=CommandKind.HARDWARE, key="1-1")
    result = monitor.execute_order(HardwareOrder(pids=(), command=command))
    assert result is not None
    (change,) = result[0].observations
    assert change.before == 11


def test_job_is_examined_on_request_and_not_again_for_one_hang() -> None:
    examined = itertools.count(1)
    sources = [
        Source(name="s", probe=lambda _: [observe("state", "up", is_abnormal=True)]),
        Source(
            name="job",
            probe=lambda _: [replace(FOUND, now=next(examined))],
            examines_job=True,
        ),
    ]
    monitor = HardwareMonitor(lambda: None, sources=sources)

    def read_sources(*, whole_job: bool, onset_ns: int = 0) -> list[tuple[str, object]]:
        command = Command(id="r", kind=CommandKind.HARDWARE, key="1-1", whole_job=whole_job)
        order = HardwareOrder(pids=(), command=command, onset_ns=onset_ns)
        result = monitor.execute_order(order)
        assert result is not None
        return [(o.source, o.now) for o in result[0].observations]

    assert read_sources(whole_job=False) == [("s", "up")]
    assert read_sources(whole_job=True) == [("s", "up"), ("job", 1)]
    assert read_sources(whole_job=False) == [("s", "up"), ("job", 1)]
    assert next(examined) == 2
    later_ns = time.monotonic_ns() + SECOND_NS
    assert read_sources(whole_job=False, onset_ns=later_ns) == [("s", "up")]
