"""What the node agent does only while somebody looks on: it tells calls as they are made, and
records where ranks spend their time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from hangwatch.protocol import heartbeat
from hangwatch.protocol.live import (
    CallKind,
    RecordingReply,
    TracedCall,
    TraceReply,
    decode_tensor_stats,
)
from hangwatch.ring import checks
from hangwatch.ring.reader import RingReader
from hangwatch.ring.tracing import TimedEntry, read_trace

from ..discovery.watched import WatchedProcess
from ..stacks.pyspy import PySpy
from .pyspy_record import RecordingSpec
from .recordings import RecordingOrder, RecordingWorker

MAX_TRACE_REQUESTS = 256  # that may be asked for between two heartbeats
MAX_TRACED_CALLS = 8000  # in one heartbeat, of all of them
TRACE_REQUEST_TTL_S = 15.0  # after which nobody waits for one any more
MAX_RECORDING_REPLIES = 64  # answers kept


class LiveRequests:
    """A request for calls is answered anew with each heartbeat until one got there, so that no
    calls are kept here.
    """

    def __init__(self, pyspy: PySpy, wake: Callable[[], None]) -> None:
        self.recording_worker = RecordingWorker(pyspy, wake)
        # by id, and when it was asked
        self._trace_requests: dict[str, tuple[heartbeat.Command, int]] = {}
        self._recording_replies: list[RecordingReply] = []

    def __bool__(self) -> bool:
        """Something is to be told."""
        return bool(self._recording_replies)

    def execute_command(
        self, command: heartbeat.Command, w: WatchedProcess | None, now: int
    ) -> None:
        """Takes up a request for calls or for a recording. What cannot be is an answer, too."""
        if command.ask is heartbeat.CommandKind.TRACE:
            self._trace_requests[command.id] = (command, now)
            while len(self._trace_requests) > MAX_TRACE_REQUESTS:
                del self._trace_requests[next(iter(self._trace_requests))]
            return
        if command.ends:
            self.recording_worker.stop_recording(command.ends)
            return
        why = (
            "this node agent knows no such process"
            if w is None
            else "the process has ended"
            if w.exit
            else None
        )
        if why is None and w is not None:
            wish = RecordingSpec(
                pid=w.pid,
                start_ticks=w.start_ticks,
                seconds=command.seconds,
                rate=command.rate,
                native=command.native,
                gil=command.gil,
            )
            if self.recording_worker.submit_order(
                RecordingOrder(key=command.key, request_id=command.id, spec=wish)
            ):
                return
            why = "too many recordings are waiting on this node: ask again later"
        self._recording_replies.append(
            RecordingReply(key=command.key, request=command.id, error=why)
        )

    def collect_results(self) -> bool:
        """True where a recording has begun or ended."""
        found = self.recording_worker.take_results()
        self._recording_replies = (self._recording_replies + found)[-MAX_RECORDING_REPLIES:]
        return bool(found)

    def build_trace_replies(
        self, watched: Mapping[str, WatchedProcess], now: int
    ) -> tuple[TraceReply, ...]:
        """The calls that were asked for, as of now."""
        self._trace_requests = {
            name: (command, at)
            for name, (command, at) in self._trace_requests.items()
            if (now - at) / 1e9 < TRACE_REQUEST_TTL_S
        }
        share = MAX_TRACED_CALLS // max(1, len(self._trace_requests))
        asked = [
            replace(command, most=min(command.most, share))
            for command, _ in self._trace_requests.values()
        ]
        return tuple(
            self._answer_trace(command, watched.get(command.key), now) for command in asked
        )

    def next_recording_replies(self) -> tuple[RecordingReply, ...]:
        """What is to be told of recordings: one profile at a time, since a heartbeat has a largest
        size.
        """
        first = next(
            (n for n, told in enumerate(self._recording_replies) if told.profile),
            len(self._recording_replies),
        )
        return tuple(self._recording_replies[: first + 1])

    def mark_delivered(self, heartbeat: heartbeat.Heartbeat) -> None:
        for reply in heartbeat.traces:
            self._trace_requests.pop(reply.request, None)
        told = {id(recorded) for recorded in heartbeat.recordings}
        self._recording_replies = [
            recorded for recorded in self._recording_replies if id(recorded) not in told
        ]

    def _answer_trace(
        self, command: heartbeat.Command, w: WatchedProcess | None, now: int
    ) -> TraceReply:
        why = "this node agent knows no such process" if w is None else w.ring_problem
        if w is not None and not why and w.reader is None:
            why = (
                "it has no ring: hangwatch is not active in it, or it has not imported torch;"
                " `hangwatch doctor` says why"
            )
        if w is None or w.reader is None or why:
            return TraceReply(key=command.key, request=command.id, error=why)
        try:
            return self._read_calls(w, w.reader, command, now)
        except (
            Exception
        ) as error:  # whatever nonsense is in there: the heartbeat goes out all the same
            return TraceReply(
                key=command.key,
                request=command.id,
                error=f"its ring cannot be read: {type(error).__name__}: {error}",
            )

    def _read_calls(
        self, w: WatchedProcess, reader: RingReader, command: heartbeat.Command, now: int
    ) -> TraceReply:
        if command.after < 0:
            return TraceReply(key=command.key, request=command.id, upto=reader.count_records())
        found = read_trace(
            reader,
            command.after,
            now,
            op=command.op,
            max_calls=command.most,
            is_last=command.last or w.exit is not None,
        )
        kinds: dict[CallKind, int] = {}
        values = checks.read_check_values(reader) if command.values else {}
        return TraceReply(
            key=command.key,
            request=command.id,
            upto=found.next_index,
            missed=found.missed,
            calls=tuple(_make_traced_call(traced, kinds, values) for traced in found.calls),
            kinds=tuple(kinds),
            more=found.has_more,
            others=found.other_ops,
        )


def _make_traced_call(
    traced: TimedEntry,
    kinds: dict[CallKind, int],
    values: Mapping[tuple[int, int], Mapping[str, float]],
) -> TracedCall:
    """``values``: of what the sampled calls carried, by sequence uid and seq."""
    call = traced.entry.call
    kind = CallKind(signature=call.signature, site=call.site, blocking=call.blocking)
    return TracedCall(
        uid=traced.entry.uid,
        seq=call.seq,
        kind=kinds.setdefault(kind, len(kinds)),
        entered_s=round(call.entered_s, 6),
        within_s=None if traced.within_s is None else round(traced.within_s, 6),
        pending=traced.is_pending,
        raised=call.raised,
        values=decode_tensor_stats(values.get((traced.entry.uid, call.seq))),
    )
