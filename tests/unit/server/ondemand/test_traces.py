"""Traces (sessions, requests to node agents, events) and recordings, from request to result."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hangwatch.model.calls import Signature, Site, StreamKind
from hangwatch.model.ranks import ExitInfo, Lifecycle
from hangwatch.protocol import heartbeat
from hangwatch.protocol.commands import (
    CallKind,
    Command,
    CommandKind,
    RecordingReply,
    TensorStats,
    TracedCall,
    TraceReply,
)
from hangwatch.server.core.clock import Clock
from hangwatch.server.ingest.command_queue import CommandQueue
from hangwatch.server.ondemand import recordings
from hangwatch.server.ondemand.recordings import (
    OVERHEAD_S,
    START_TIMEOUT_S,
    RecordingRegistry,
    RequestedRecording,
    describe_recording,
    unpack_profiles,
)
from hangwatch.server.ondemand.traces import (
    EXIT_GRACE_S,
    MAX_PENDING_EVENTS,
    REPLY_TIMEOUT_S,
    REQUEST_RETRY_S,
    TraceRegistry,
    TraceSession,
    stream_events,
)
from hangwatch.stacks.profile import pack_profile, parse_pyspy_raw
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.fleet import Fleet

NOW = 100.0
CALL_KIND = CallKind(
    signature=Signature(op="all_reduce", shapes=((64,),), dtype="float32"),
    site=Site(file="a.py", line=3, function="f"),
)


def make_attempt() -> Attempt:
    """Two ranks on host a, and one on host b, in one group."""
    fleet = Fleet()
    pair = heartbeat.StreamIdentity(
        kind=StreamKind.COLLECTIVE, name="0", desc="default_pg", ranks="0-2"
    )
    for host, ranks in (("a", (0, 1)), ("b", (2,))):
        processes = tuple(
            heartbeat.ProcessUpdate(
                key=f"{r}-1",
                lifecycle=int(Lifecycle.INITIALISED),
                identity=heartbeat.ProcessIdentity(
                    job="run7", rank=r, world_size=3, pid=r, start_ticks=1
                ),
                streams=(heartbeat.StreamUpdate(uid=1, identity=pair, entered=5),),
            )
            for r in ranks
        )
        fleet.apply_heartbeat(
            heartbeat.Heartbeat(host=host, agent=f"agent-{host}", number=1, processes=processes),
            NOW,
        )
    attempt = fleet.latest_attempt("run7")
    assert attempt is not None
    return attempt


@pytest.fixture
def traces() -> TraceRegistry:
    clock = Clock(monotonic=lambda: NOW)
    return TraceRegistry(clock=clock, command_queue=CommandQueue(clock=clock))


def take_commands(
    traces: TraceRegistry, agent: str, now: float, *replies: TraceReply, sent: float = 5.0
) -> tuple[Command, ...]:
    """The commands that an agent gets with the reply to a heartbeat."""
    beat = heartbeat.Heartbeat(host=agent, agent=agent, number=9, traces=replies, sent_s=sent)
    traces.apply_heartbeat(beat, now)
    return traces.command_queue.take_unsent(agent)


def make_heartbeat(*replies: TraceReply, sent: float = 5.0) -> heartbeat.Heartbeat:
    return heartbeat.Heartbeat(host="a", agent="agent-a", number=9, traces=replies, sent_s=sent)


def make_reply(command: Command, upto: int, *seqs: int, **more: Any) -> TraceReply:
    calls = tuple(TracedCall(uid=1, seq=seq, kind=0, entered_s=0.25) for seq in seqs)
    return TraceReply(
        key=command.key, request=command.id, upto=upto, calls=calls, kinds=(CALL_KIND,), **more
    )


def list_events(listener: TraceSession, kind: str) -> list[dict[str, Any]]:
    return [event for event_kind, event in listener.events if event_kind == kind]


def start_listener(traces: TraceRegistry, **wanted: Any) -> TraceSession:
    """A session for rank 0, whose node agent has sent its first reply."""
    listener = traces.start_session(make_attempt(), [0], NOW, **wanted)
    (command,) = take_commands(traces, "agent-a", NOW)
    assert command.after == -1
    traces.apply_heartbeat(make_heartbeat(make_reply(command, 40)), NOW)
    return listener


def test_no_listener_means_no_commands(traces: TraceRegistry) -> None:
    assert take_commands(traces, "agent-a", NOW) == ()
    assert not traces.is_agent_traced("agent-a")
    listener = traces.start_session(make_attempt(), [0, 1], NOW, op="barrier", values=True)
    commands = take_commands(traces, "agent-a", NOW)
    assert [(c.kind, c.key, c.op, c.values, c.after) for c in commands] == [
        (CommandKind.TRACE, f"{r}-1", "barrier", True, -1) for r in (0, 1)
    ]
    assert take_commands(traces, "agent-b", NOW) == () and not traces.is_agent_traced("agent-b"), (
        "none of its ranks is traced"
    )
    assert take_commands(traces, "agent-a", NOW + 1) == (), "one request at a time"
    assert len(take_commands(traces, "agent-a", NOW + REQUEST_RETRY_S)) == 2, (
        "a lost reply is requested again"
    )
    traces.drop_request(listener.id)
    assert take_commands(traces, "agent-a", NOW + 20) == () and not traces.is_agent_traced(
        "agent-a"
    )


def test_calls_are_ordered_and_replies_count_once(traces: TraceRegistry) -> None:
    listener = start_listener(traces)
    (command,) = take_commands(traces, "agent-a", NOW)
    assert command.after == 40
    answer = make_reply(command, 43, 6, 7, missed=1, others=("barrier",))
    traces.apply_heartbeat(make_heartbeat(answer), NOW + 0.2)
    traces.apply_heartbeat(make_heartbeat(answer), NOW + 0.4)
    first, second = list_events(listener, "call")
    assert (first["op"], first["shapes"], first["dtype"], first["rank"], first["seq"]) == (
        "all_reduce",
        [[64]],
        "float32",
        0,
        6,
    )
    assert first["group"] == {"name": "0", "desc": "default_pg"} and first["site"] == {
        "file": "a.py",
        "line": 3,
        "function": "f",
    }
    assert (second["seq"], second["values"], second["within_s"], second["async"]) == (
        7,
        None,
        None,
        None,
    )
    assert list_events(listener, "missed") == [{"rank": 0, "calls": 1}]
    assert list_events(listener, "others") == [{"ops": ["barrier"]}]
    (command,) = take_commands(traces, "agent-a", NOW + 0.5)
    assert command.after == 43
    assert listener.status == "pending"


def test_calls_of_ranks_on_one_host_are_merged_in_time_order(
    traces: TraceRegistry,
) -> None:
    listener = traces.start_session(make_attempt(), [0, 1], NOW)
    traces.apply_heartbeat(
        make_heartbeat(
            *(make_reply(command, 1) for command in take_commands(traces, "agent-a", NOW))
        ),
        NOW,
    )
    ages = ((0.4, 0.2), (0.3, 0.1))
    replies = [
        replace(
            make_reply(command, 3),
            calls=tuple(
                TracedCall(uid=1, seq=n, kind=0, entered_s=age) for n, age in enumerate(those)
            ),
        )
        for command, those in zip(take_commands(traces, "agent-a", NOW), ages, strict=True)
    ]
    traces.apply_heartbeat(make_heartbeat(*replies), NOW)
    assert [(call["rank"], call["seq"]) for call in list_events(listener, "call")] == [
        (0, 0),
        (1, 0),
        (0, 1),
        (1, 1),
    ]
    assert [what for what, _ in listener.events][:2] == ["start", "start"]


def test_trace_may_be_limited_to_one_group(traces: TraceRegistry) -> None:
    for name, calls in (("default_pg", 1), ("0", 1), ("other", 0)):
        listener = start_listener(traces, group=name)
        (command,) = take_commands(traces, "agent-a", NOW)
        traces.apply_heartbeat(make_heartbeat(make_reply(command, 41, 6)), NOW)
        assert len(list_events(listener, "call")) == calls
        traces.drop_request(listener.id)


def test_trace_ends_after_delayed_calls_arrive(traces: TraceRegistry) -> None:
    listener = start_listener(traces, seconds=2.0)
    (command,) = take_commands(traces, "agent-a", NOW + 1.9)
    assert not command.last
    reply = make_reply(command, 41, 6)
    (command,) = take_commands(traces, "agent-a", NOW + 1.9, reply, sent=6.9)
    reply = make_reply(command, 41)
    (command,) = take_commands(traces, "agent-a", NOW + 2.1, reply, sent=7.1)
    assert command.last
    after = TracedCall(uid=1, seq=8, kind=0, entered_s=0.0)
    reply = make_reply(command, 43, 7)
    late = replace(reply, calls=(*reply.calls, after))
    traces.apply_heartbeat(make_heartbeat(late, sent=7.1), NOW + 2.1)
    assert [call["seq"] for call in list_events(listener, "call")] == [
        6,
        7,
    ], "one was made after the end"
    assert listener.status == "done"
    assert take_commands(traces, "agent-a", NOW + 3) == ()


def test_full_reply_is_not_the_last(traces: TraceRegistry) -> None:
    listener = start_listener(traces, seconds=1.0)
    (command,) = take_commands(traces, "agent-a", NOW)
    (command,) = take_commands(traces, "agent-a", NOW + 2, make_reply(command, 40))
    assert command.last
    traces.apply_heartbeat(make_heartbeat(make_reply(command, 43, 1, 2, 3, more=True)), NOW + 2)
    assert listener.status == "pending"
    (command,) = take_commands(traces, "agent-a", NOW + 2)
    traces.apply_heartbeat(make_heartbeat(make_reply(command, 44)), NOW + 2)
    assert listener.status == "done"


def test_slow_reader_loses_calls_and_is_informed(traces: TraceRegistry) -> None:
    listener = start_listener(traces)
    listener.events.extend(("call", {}) for _ in range(MAX_PENDING_EVENTS))
    (command,) = take_commands(traces, "agent-a", NOW)
    traces.apply_heartbeat(make_heartbeat(make_reply(command, 42, 6, 7)), NOW)
    assert list_events(listener, "missed") == [{"rank": 0, "calls": 2}]


def test_unresponsive_or_exited_rank_is_given_up(traces: TraceRegistry) -> None:
    attempt = make_attempt()
    silent = traces.start_session(attempt, [2], NOW)
    silent.end_overdue_ranks(NOW + REPLY_TIMEOUT_S - 1)
    assert silent.status == "pending"
    silent.end_overdue_ranks(NOW + REPLY_TIMEOUT_S)
    assert silent.status == "done" and "did not reply" in list_events(silent, "error")[0]["detail"]
    exited = traces.start_session(attempt, [0], NOW)
    process = attempt.processes[0]
    (command,) = take_commands(traces, "agent-a", NOW)
    traces.apply_heartbeat(make_heartbeat(make_reply(command, 1)), NOW)
    (command,) = take_commands(traces, "agent-a", NOW)
    process.exit, process.exited_at = ExitInfo(exit_status=0), NOW
    (command,) = take_commands(traces, "agent-a", NOW + 0.1, make_reply(command, 1))
    assert command.last
    exited.end_overdue_ranks(NOW + EXIT_GRACE_S + 1)
    assert exited.status == "done"
    refused = traces.start_session(attempt, [1], NOW)
    (command,) = take_commands(traces, "agent-a", NOW)
    traces.apply_heartbeat(
        make_heartbeat(TraceReply(key=command.key, request=command.id, error="it has no ring")), NOW
    )
    assert refused.status == "done" and list_events(refused, "error") == [
        {"rank": 1, "detail": "it has no ring"}
    ]


def test_stream_sends_everything_and_ends(traces: TraceRegistry) -> None:
    listener = start_listener(traces, seconds=1.0)
    (command,) = take_commands(traces, "agent-a", NOW)
    (command,) = take_commands(traces, "agent-a", NOW + 2, make_reply(command, 40), sent=7.0)
    reply = TraceReply(
        key=command.key, request=command.id, upto=41, kinds=(CALL_KIND,),
        calls=(TracedCall(uid=1, seq=6, kind=0, entered_s=1.5, within_s=0.1, values=TensorStats(mean=1.0, nonfinite=3)),),
    )  # fmt: skip
    traces.apply_heartbeat(make_heartbeat(reply, sent=7.0), NOW + 2)

    async def read_stream() -> str:
        return "".join([part async for part in stream_events(traces, listener, lambda: False)])

    events = [
        dict(line.split(": ", 1) for line in event.splitlines())
        for event in asyncio.run(read_stream()).split("\n\n")
        if event
    ]
    assert [e["event"] for e in events] == ["start", "call", "end"]
    call = json.loads(events[1]["data"])
    assert call["values"] == {"mean": 1.0, "min": None, "max": None, "norm": None, "nonfinite": 3}
    assert json.loads(events[2]["data"]) == {"reason": "done"}


RAW_PROFILE = (
    "thread (1): MainThread;<module> (/u/t.py:9);crunch (/u/t.py:3) 90\nthread (1):"
    " MainThread;<module> (/u/t.py:8) 10"
)


class TestRecordings:
    @pytest.fixture
    def request_recording(
        self,
    ) -> Callable[..., tuple[RecordingRegistry, RequestedRecording, tuple[Command, ...]]]:
        def make_recording(
            *ranks: int, **more: Any
        ) -> tuple[RecordingRegistry, RequestedRecording, tuple[Command, ...]]:
            clock = Clock(monotonic=lambda: NOW)
            command_queue = CommandQueue(clock=clock)
            registry = RecordingRegistry(clock=clock, command_queue=command_queue)
            wanted = recordings.RecordingRequest(ranks=list(ranks), seconds=2, **more)
            record = registry.request_recording(make_attempt(), wanted, NOW)
            return registry, record, command_queue.take_unsent("agent-a")

        return make_recording

    def test_recording_from_request_to_result(self, request_recording: Callable[..., Any]) -> None:
        registry, record, (first, second) = request_recording(0, 1, rate=50, native=True)
        assert (first.kind, first.key, first.seconds, first.rate, first.native, first.gil) == (
            CommandKind.RECORD,
            "0-1",
            2,
            50,
            True,
            False,
        )
        assert registry.find_conflict(make_attempt(), [0], NOW) == record.id
        assert registry.find_conflict(make_attempt(), [2], NOW) is None, "another host"
        registry.apply_replies([RecordingReply(key="0-1", request=first.id, begun=True)], NOW + 1)
        assert [r.status for r in describe_recording(record).ranks] == ["recording", "waiting"]
        registry.apply_replies(
            [
                RecordingReply(
                    key="0-1",
                    request=first.id,
                    seconds=2.0,
                    profile=pack_profile(parse_pyspy_raw(RAW_PROFILE.splitlines(), 1)),
                )
            ],
            NOW + 4,
        )
        registry.apply_replies(
            [RecordingReply(key="1-1", request=second.id, error="py-spy may not attach")], NOW + 4
        )
        document = describe_recording(record)
        assert document.status == "done" and [r.status for r in document.ranks] == [
            "done",
            "failed",
        ]
        (thread,) = document.ranks[0].threads
        assert (thread.hottest[0].function, thread.hottest[0].samples, thread.samples) == (
            "crunch",
            90,
            100,
        )
        assert document.ranks[1].error == "py-spy may not attach"
        assert registry.find_conflict(make_attempt(), [0], NOW) is None
        assert [rank for rank, _ in unpack_profiles(record)] == [0]

    def test_recording_can_be_stopped_early(self, request_recording: Callable[..., Any]) -> None:
        registry, record, (first, second) = request_recording(0, 1)
        registry.apply_replies(
            [
                RecordingReply(
                    key="0-1",
                    request=first.id,
                    profile=pack_profile(parse_pyspy_raw(RAW_PROFILE.splitlines(), 1)),
                )
            ],
            NOW,
        )
        registry.stop_recording(record, make_attempt(), NOW)
        (command,) = registry.command_queue.take_unsent("agent-a")
        assert (command.kind, command.key, command.stops) == (
            CommandKind.RECORD,
            "1-1",
            second.id,
        ), "the other has ended"
        registry.stop_recording(record, make_attempt(), NOW)
        registry.find_request(record.id, NOW + START_TIMEOUT_S + 1)
        assert record.status == "done", "an agent that does not reply is given up"

    def test_unanswered_recording_fails(self, request_recording: Callable[..., Any]) -> None:
        registry, kept, (first, _) = request_recording(0, 1)
        registry.find_request(kept.id, NOW + START_TIMEOUT_S + 2 + OVERHEAD_S - 1)
        assert kept.status == "pending"
        registry.apply_replies([RecordingReply(key="0-1", request=first.id, begun=True)], NOW + 10)
        record = registry.find_request(kept.id, NOW + START_TIMEOUT_S + 2 * (2 + OVERHEAD_S) + 1)
        assert record is not None
        document = describe_recording(record)
        assert [r.status for r in document.ranks] == ["failed", "failed"]
        assert "did not end" in str(document.ranks[0].error) and "did not begin" in str(
            document.ranks[1].error
        )

    def test_invalid_profile_is_an_error_of_its_rank(
        self, request_recording: Callable[..., Any]
    ) -> None:
        made, kept, (first,) = request_recording(0)
        made.apply_replies([RecordingReply(key="0-1", request=first.id, profile="{}")], NOW)
        (rank,) = describe_recording(kept).ranks
        assert rank.status == "failed" and "not understood" in str(rank.error)
        assert unpack_profiles(kept) == []

    def test_too_many_samples_are_refused(self) -> None:
        with pytest.raises(ValueError, match="30000 samples"):
            recordings.RecordingRequest(ranks=[0], seconds=300, rate=1000)
