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

from ..discovery.watched import Watched
from ..stacks.pyspy import PySpy
from .pyspy_record import Wish
from .recordings import Order, Recordings

TRACES = 256  # that may be asked for between two heartbeats
CALLS = 8000  # in one heartbeat, of all of them
TRACED_S = 15.0  # after which nobody waits for one any more
RECORDINGS = 64  # answers kept


class Live:
    """A request for calls is answered anew with each heartbeat until one got there, so that no
    calls are kept here.
    """

    def __init__(self, pyspy: PySpy, wake: Callable[[], None]) -> None:
        self.recordings = Recordings(pyspy, wake)
        self._traces: dict[str, tuple[heartbeat.Command, int]] = {}  # by id, and when it was asked
        self._recorded: list[RecordingReply] = []

    def __bool__(self) -> bool:
        """Something is to be told."""
        return bool(self._recorded)

    def obey(self, command: heartbeat.Command, w: Watched | None, now: int) -> None:
        """Takes up a request for calls or for a recording. What cannot be is an answer, too."""
        if command.ask is heartbeat.CommandKind.TRACE:
            self._traces[command.id] = (command, now)
            while len(self._traces) > TRACES:
                del self._traces[next(iter(self._traces))]
            return
        if command.ends:
            self.recordings.stop(command.ends)
            return
        why = (
            "this node agent knows no such process"
            if w is None
            else "the process has ended"
            if w.ended
            else None
        )
        if why is None and w is not None:
            wish = Wish(
                pid=w.pid,
                start_ticks=w.start_ticks,
                seconds=command.seconds,
                rate=command.rate,
                native=command.native,
                gil=command.gil,
            )
            if self.recordings.submit(Order(key=command.key, request=command.id, wish=wish)):
                return
            why = "too many recordings are waiting on this node: ask again later"
        self._recorded.append(RecordingReply(key=command.key, request=command.id, error=why))

    def take_results(self) -> bool:
        """True where a recording has begun or ended."""
        found = self.recordings.results()
        self._recorded = (self._recorded + found)[-RECORDINGS:]
        return bool(found)

    def traces(self, watched: Mapping[str, Watched], now: int) -> tuple[TraceReply, ...]:
        """The calls that were asked for, as of now."""
        self._traces = {
            name: (command, at)
            for name, (command, at) in self._traces.items()
            if (now - at) / 1e9 < TRACED_S
        }
        share = CALLS // max(1, len(self._traces))
        asked = [
            replace(command, most=min(command.most, share)) for command, _ in self._traces.values()
        ]
        return tuple(self._trace(command, watched.get(command.key), now) for command in asked)

    def recorded(self) -> tuple[RecordingReply, ...]:
        """What is to be told of recordings: one profile at a time, since a heartbeat has a largest
        size.
        """
        first = next(
            (n for n, told in enumerate(self._recorded) if told.profile), len(self._recorded)
        )
        return tuple(self._recorded[: first + 1])

    def delivered(self, beat: heartbeat.Heartbeat) -> None:
        for reply in beat.traces:
            self._traces.pop(reply.request, None)
        told = {id(recorded) for recorded in beat.recordings}
        self._recorded = [recorded for recorded in self._recorded if id(recorded) not in told]

    def _trace(self, command: heartbeat.Command, w: Watched | None, now: int) -> TraceReply:
        why = "this node agent knows no such process" if w is None else w.problem
        if w is not None and not why and w.reader is None:
            why = (
                "it has no ring: hangwatch is not active in it, or it has not imported torch;"
                " `hangwatch doctor` says why"
            )
        if w is None or w.reader is None or why:
            return TraceReply(key=command.key, request=command.id, error=why)
        try:
            return self._read(w, w.reader, command, now)
        except (
            Exception
        ) as error:  # whatever nonsense is in there: the heartbeat goes out all the same
            return TraceReply(
                key=command.key,
                request=command.id,
                error=f"its ring cannot be read: {type(error).__name__}: {error}",
            )

    def _read(
        self, w: Watched, reader: RingReader, command: heartbeat.Command, now: int
    ) -> TraceReply:
        if command.after < 0:
            return TraceReply(key=command.key, request=command.id, upto=reader.count_records())
        found = read_trace(
            reader,
            command.after,
            now,
            op=command.op,
            max_calls=command.most,
            is_last=command.last or w.ended is not None,
        )
        kinds: dict[CallKind, int] = {}
        values = checks.read_check_values(reader) if command.values else {}
        return TraceReply(
            key=command.key,
            request=command.id,
            upto=found.next_index,
            missed=found.missed,
            calls=tuple(_call(traced, kinds, values) for traced in found.calls),
            kinds=tuple(kinds),
            more=found.has_more,
            others=found.other_ops,
        )


def _call(
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
