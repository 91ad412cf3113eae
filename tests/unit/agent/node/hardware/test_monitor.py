"""The monitor reads sources in its own thread, and those that may block in processes."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from hangwatch.agent.node.hardware import monitor, reader
from hangwatch.agent.node.hardware.host import Host, SourceUnavailableError
from hangwatch.agent.node.hardware.monitor import HardwareMonitor, HardwareOrder
from hangwatch.agent.node.hardware.reader import ReaderProcess, Source
from hangwatch.model.hardware import Observation
from hangwatch.protocol.commands import Command, CommandKind
from hangwatch.protocol.heartbeat import HardwareReply
from tests.simulation.waiting import wait_for_value

SECOND_NS = 1_000_000_000
COMMAND = Command(id="r", kind=CommandKind.HARDWARE, key="7-1")


class CountingSource:
    """A counter that grows with each reading, unless ``missing``."""

    def __init__(self, missing: bool = False) -> None:
        self.readings: list[tuple[int, ...]] = []
        self.missing = missing

    def probe(self, host: Host) -> tuple[Observation, ...]:
        self.readings.append(host.pids)
        if self.missing:
            raise SourceUnavailableError("none here", "buy one")
        return (
            Observation(
                source="counted", about="x", what="n", now=len(self.readings), is_counter=True
            ),
        )


def make_monitor(*sources: Source, **options: object) -> tuple[HardwareMonitor, threading.Event]:
    woken = threading.Event()
    return HardwareMonitor(woken.set, sources=sources, **options), woken  # type: ignore[arg-type]


def request_reply(
    monitor: HardwareMonitor, woken: threading.Event, onset_ns: int = 0
) -> HardwareReply:
    order = HardwareOrder(pids=(7,), command=COMMAND, onset_ns=onset_ns)
    assert monitor.submit_order(order)
    assert woken.wait(20)
    ((reply, taken_ns),) = monitor.take_results()
    assert abs(time.monotonic_ns() - taken_ns) < 20 * SECOND_NS
    assert (reply.key, reply.request) == ("7-1", "r")
    return reply


def test_change_since_the_baseline() -> None:
    counting = CountingSource()
    hardware, woken = make_monitor(Source(name="counted", probe=counting.probe, has_counters=True))
    start_ns = time.monotonic_ns()
    hardware.update_baseline((), start_ns)
    hardware.update_baseline((7,), start_ns)
    assert counting.readings == [], "not while the first rank starts"
    hardware.update_baseline((7,), start_ns + 3 * SECOND_NS)
    hardware.update_baseline((7,), start_ns + 4 * SECOND_NS)
    wait_for_value(lambda: counting.readings, "a baseline")
    reply = request_reply(hardware, woken)
    assert [(o.before, o.now) for o in reply.observations] == [(1, 2)]
    assert counting.readings == [(7,), (7,)]


def test_missing_source_is_tried_again_on_request_only() -> None:
    counting = CountingSource(missing=True)
    hardware, woken = make_monitor(
        Source(name="counted", probe=counting.probe, has_counters=True), interval_s=0.001
    )
    for number in range(5):
        hardware.update_baseline((7,), number * 10 * SECOND_NS + 1)
    reply = request_reply(hardware, woken)
    assert len(counting.readings) == 2, "one baseline and the request"
    ((missing),) = reply.unavailable
    assert (missing.source, missing.reason, missing.remedy) == ("counted", "none here", "buy one")


def test_fault_of_a_source_leaves_the_others() -> None:
    def fail(host: Host) -> tuple[Observation, ...]:
        raise ZeroDivisionError

    counting = CountingSource()
    hardware, woken = make_monitor(
        Source(name="broken", probe=fail),
        Source(name="counted", probe=counting.probe, has_counters=True),
    )
    reply = request_reply(hardware, woken)
    assert "ZeroDivisionError" in reply.unavailable[0].reason
    assert len(counting.readings) == 1


def test_error_of_ours_is_a_reply() -> None:
    def fail(pids: tuple[int, ...]) -> Host:
        raise ZeroDivisionError

    hardware, woken = make_monitor(make_host=fail)
    ((missing),) = request_reply(hardware, woken).unavailable
    assert "ZeroDivisionError" in missing.reason
    woken.clear()
    assert request_reply(hardware, woken).unavailable, "the thread continues"


def make_reader(program: str) -> ReaderProcess:
    return ReaderProcess((sys.executable, "-c", program))


def never_called(host: Host) -> tuple[Observation, ...]:
    raise AssertionError("a source that may block was read in this process")


def test_source_that_blocks_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "TIME_LIMIT_S", 0.5)
    counting = CountingSource()
    hardware, woken = make_monitor(
        Source(name="stuck", probe=never_called, may_block=True),
        Source(name="counted", probe=counting.probe),
        reader=make_reader("import time; time.sleep(60)"),
    )
    began = time.monotonic()
    reply = request_reply(hardware, woken)
    assert time.monotonic() - began < 10
    ((missing),) = reply.unavailable
    assert (missing.source, missing.reason) == ("stuck", "it did not answer within 0.5 seconds")
    assert len(counting.readings) == 1


def test_blocked_source_leaves_the_one_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "TIME_LIMIT_S", 1.5)
    line = '{"source": "good", "observations": [], "unavailable": null}'
    hardware, woken = make_monitor(
        Source(name="stuck", probe=never_called, may_block=True),
        Source(name="good", probe=never_called, may_block=True),
        reader=make_reader(f"import time; print({line!r}, flush=True); time.sleep(60)"),
    )
    reply = request_reply(hardware, woken)
    assert [missing.source for missing in reply.unavailable] == ["stuck"]
    assert [(o.source, o.what) for o in reply.observations] == [("stuck", "does_not_return")]


@pytest.mark.parametrize("program", ["raise SystemExit(3)", "print('not JSON')", "print('{}')"])
def test_reader_that_fails(program: str) -> None:
    hardware, woken = make_monitor(
        Source(name="broken", probe=never_called, may_block=True),
        reader=make_reader(program),
    )
    ((missing),) = request_reply(hardware, woken).unavailable
    assert "its reader ended with status" in missing.reason


ANSWER_BY_PID = """
import json, os, sys
for line in sys.stdin:
    seen = {"source": "good", "about": "reader", "what": "pid", "now": os.getpid()}
    print(json.dumps({"source": "good", "observations": [seen], "unavailable": None}), flush=True)
    if json.loads(line)["pids"] == [8]:
        break
"""


def test_reader_is_kept_until_it_ends() -> None:
    source = Source(name="good", probe=never_called, may_block=True)
    kept = make_reader(ANSWER_BY_PID)

    def read(pid: int) -> object:
        kept.start_reading([source], Host(pids=(pid,)))
        (((observation,), unavailable),) = kept.collect(20)
        assert unavailable is None
        return observation.now

    first = read(7)
    assert read(8) == first, "the same process answers again"
    time.sleep(0.5)
    assert read(7) != first, "it has ended after its second answer: another one is started"
    kept.close()


def test_queue_of_orders_is_bounded() -> None:
    release = threading.Event()

    def wait(host: Host) -> tuple[Observation, ...]:
        release.wait(20)
        return ()

    hardware, _ = make_monitor(Source(name="slow", probe=wait))
    order = HardwareOrder(pids=(7,), command=COMMAND)
    accepted = [hardware.submit_order(order) for _ in range(monitor.MAX_WAITING_ORDERS + 2)]
    assert not accepted[-1]
    release.set()
