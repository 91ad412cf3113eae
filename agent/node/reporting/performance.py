"""How the calls of this host's ranks perform: added up from their rings, and told to the server
every few seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hangwatch.model.calls import StreamKind
from hangwatch.performance.distributions import (
    MAX_DURATION_US,
    MIN_TIMED_LEVEL,
    MUTUAL_WAIT_OPS,
    DurationHistogram,
    full_size,
    is_even_split,
    sample_calls,
    size_class,
    timing_level,
)
from hangwatch.protocol import heartbeat
from hangwatch.protocol.clocks import ClockOffset
from hangwatch.ring.layout import RecordFlag
from hangwatch.ring.reader import RingReader
from hangwatch.ring.snapshot import StreamState

from .uplink import Outcome

EVERY_S = 2.0  # between two reports
USUAL_S, BEATS = (
    0.5,
    8,
)  # where a server has so much to do that heartbeats are further apart than usual: so many of them
ROWS = 512  # sequences in one report; the others go with the next one
SAMPLES = (
    (64, 16),
    (512, 8),
    (1 << 20, 2),
)  # calls of a group that are compared in a report, by its size up to so many members
_HELD = 64  # arrivals of a sequence before they are thinned
_OPEN = 1024  # timed calls that are not over, of a process
_PATIENCE, _PATIENCE_NS = (
    64,
    5_000_000_000,
)  # later calls of its sequence, and time, by which a timed one is over or will not be told of
_SEEN = 4096  # kinds of calls

_ENTERED, _DONE, _SEQ, _BYTES, _UID, _SIGNATURE, _FLAGS = 1, 2, 3, 6, 7, 8, 11  # fields of a record
_TIMED, _RAISED = int(RecordFlag.TIMED), int(RecordFlag.RAISED)  # an enum's own & is slow


@dataclass(frozen=True, slots=True)
class _Kind:
    """Calls with one signature."""

    op: str
    size: int  # bytes, as nccl-tests count them
    even: bool  # the same on every rank


@dataclass(slots=True)
class _Row:
    """Calls of one operation and size class, since the last report."""

    calls: int = 0
    bytes: int = 0
    latency: DurationHistogram = field(default_factory=DurationHistogram)


@dataclass(slots=True)
class _Arrival:
    """At a call that is compared. In nanoseconds, -1: not known."""

    entered: int
    since: int  # the call before it
    kind: _Kind
    took: int = -1


@dataclass(slots=True)
class _Calls:
    """Of one sequence, since the last report."""

    compared: int  # calls in a report; 0: there is nobody to compare with
    members: int
    last: int = 0  # the newest call that was read
    last_ns: int = 0  # when it was entered
    missed: int = 0
    timed: set[str] = field(
        default_factory=set
    )  # operations of which some calls have told when they were over
    rows: dict[tuple[str, int], _Row] = field(default_factory=dict)
    arrivals: dict[int, _Arrival] = field(default_factory=dict)  # by seq
    thinned: int = 0  # to this level

    def row(self, kind: _Kind) -> _Row:
        at = kind.op, size_class(kind.size)
        found = self.rows.get(at)
        if found is None:
            found = self.rows[at] = _Row()
        return found


@dataclass(slots=True)
class Tally:
    """Of one process."""

    _upto: int = 0  # records taken in
    _calls: dict[int, _Calls] = field(default_factory=dict)  # by sequence
    _kinds: dict[tuple[int, int, int], _Kind] = field(
        default_factory=dict
    )  # by size of the group, signature and bytes
    _open: dict[int, tuple[int, int, int, _Kind]] = field(
        default_factory=dict
    )  # record -> sequence, seq, entered_ns

    def take(
        self, records: Iterable[tuple[int, ...]], states: Sequence[StreamState], reader: RingReader
    ) -> None:
        """Takes in what was recorded since the last time. Records that come again are left out."""
        self._look_again(reader)
        fresh = [record for record in records if record[0] > self._upto]
        if not fresh:
            return
        self._upto = fresh[-1][0]
        known = {state.uid: state for state in states}
        for record in fresh:
            uid, seq = record[_UID], record[_SEQ]
            calls = self._calls.get(uid)
            if calls is None:
                if uid not in known or known[uid].kind is StreamKind.SETUP:
                    continue
                calls = self._calls[uid] = _calls(known[uid], seq)
            calls.missed += max(0, seq - calls.last - 1)
            since = (
                record[_ENTERED] - calls.last_ns if seq == calls.last + 1 and calls.last_ns else -1
            )
            calls.last, calls.last_ns = max(calls.last, seq), record[_ENTERED]
            kind = self._kind(record, calls, reader)
            row = calls.row(kind)
            row.calls += 1
            row.bytes += kind.size
            high = timing_level(seq)
            if calls.compared and high >= calls.thinned and kind.op in MUTUAL_WAIT_OPS:
                calls.arrivals[seq] = _Arrival(record[_ENTERED], max(-1, since), kind)
                while len(calls.arrivals) > _HELD:
                    calls.thinned += 1
                    calls.arrivals = {
                        s: a for s, a in calls.arrivals.items() if timing_level(s) >= calls.thinned
                    }
            if high >= MIN_TIMED_LEVEL:
                self._settle(record, uid, seq, record[_ENTERED], kind)

    def report(self, key: str) -> list[heartbeat.StreamPerformance]:
        """What there is to say since the last time, all of it."""
        found = []
        for uid, calls in self._calls.items():
            if calls.rows:
                totals = tuple(
                    heartbeat.CallTotals(
                        op=op, size=size, calls=row.calls, bytes=row.bytes,
                        latency=tuple(row.latency.counts.items()), longest_us=round(row.latency.longest_us),
                    )
                    for (op, size), row in calls.rows.items()
                )  # fmt: skip
                samples = self._samples(uid, calls)
                found.append(
                    heartbeat.StreamPerformance(
                        key=key, uid=uid, totals=totals, samples=samples, missed=calls.missed
                    )
                )
                calls.rows, calls.missed = {}, 0
        return found

    def _samples(self, uid: int, calls: _Calls) -> tuple[heartbeat.CallSample, ...]:
        """Those whose durations may still come wait for them."""
        waiting = [
            seq
            for its, seq, entered, kind in self._open.values()
            if its == uid
            and kind.op in calls.timed
            and calls.last - seq < _PATIENCE
            and calls.last_ns - entered < _PATIENCE_NS
        ]
        upto = min(waiting, default=calls.last + 1)
        ready = sorted(seq for seq in calls.arrivals if seq < upto)
        chosen = sample_calls(ready, calls.compared)
        told = [(seq, calls.arrivals[seq]) for seq in chosen]
        calls.arrivals = {seq: arrival for seq, arrival in calls.arrivals.items() if seq >= upto}
        calls.thinned = 0
        return tuple(
            (
                seq, a.entered // 1000, -1 if a.since < 0 else a.since // 1000, -1 if a.took < 0 else a.took // 1000,
                a.kind.op, size_class(a.kind.size), a.kind.size if a.kind.even else -1,
            )
            for seq, a in told
        )  # fmt: skip

    def _look_again(self, reader: RingReader) -> None:
        """At timed calls that were not over when they were read."""
        for index, (uid, seq, entered, kind) in list(self._open.items()):
            record = reader.read_record(index)
            if record is None:
                del self._open[index]
            elif record[_FLAGS] & _TIMED and record[_DONE]:
                del self._open[index]
                self._settle(record, uid, seq, entered, kind)

    def _settle(
        self, record: tuple[int, ...], uid: int, seq: int, entered: int, kind: _Kind
    ) -> None:
        calls = self._calls[uid]
        if not (record[_FLAGS] & _TIMED and record[_DONE]):
            if len(self._open) < _OPEN and not record[_FLAGS] & _RAISED:
                self._open[record[0] - 1] = uid, seq, entered, kind
            return
        took = min(max(0, record[_DONE] - entered), int(MAX_DURATION_US * 1000))
        calls.timed.add(kind.op)
        calls.row(kind).latency.add_duration(took / 1000)
        if seq in calls.arrivals:
            calls.arrivals[seq].took = took

    def _kind(self, record: tuple[int, ...], calls: _Calls, reader: RingReader) -> _Kind:
        at = (calls.members, record[_SIGNATURE], record[_BYTES])
        found = self._kinds.get(at)
        if found is None:
            if len(self._kinds) >= _SEEN:
                self._kinds.clear()
            signature = reader.read_signature(record[_SIGNATURE])
            found = _Kind(
                signature.op,
                full_size(signature.op, record[_BYTES], calls.members),
                is_even_split(signature),
            )
            self._kinds[at] = found
        return found


def _calls(state: StreamState, seq: int) -> _Calls:
    members = max(1, len(state.group.ranks))
    alike = state.kind is StreamKind.COLLECTIVE and members > 1
    compared = next(most for ranks, most in SAMPLES if members <= ranks) if alike else 0
    return _Calls(compared=compared, members=members, last=seq - 1)


@dataclass(slots=True)
class Reporter:
    """What the server is told of all processes, until it has acknowledged it."""

    _number: int = 0
    _held: heartbeat.PerformanceReport | None = None
    _rest: list[heartbeat.StreamPerformance] = field(default_factory=list)
    _next_ns: int = 0
    _interval_s: float = EVERY_S
    _offset: ClockOffset = field(default_factory=ClockOffset)

    def due(
        self, now_ns: int, tallies: Mapping[str, Tally], *, at_once: bool = False
    ) -> heartbeat.PerformanceReport | None:
        """What this heartbeat should say: what was not acknowledged, again as it was; or what is
        new, where it is time.
        """
        if self._held is not None or (now_ns < self._next_ns and not at_once):
            return self._held
        self._next_ns = now_ns + int(self._interval_s * 1e9)
        if not self._rest:
            self._rest = [part for key, tally in tallies.items() for part in tally.report(key)]
        if self._rest:
            self._number += 1
            parts, self._rest = self._rest[:ROWS], self._rest[ROWS:]
            self._held = heartbeat.PerformanceReport(
                number=self._number, clock=self.clock, sequences=tuple(parts)
            )
        return self._held

    @property
    def clock(self) -> tuple[float, float] | None:
        """Between which seconds the server's clock is ahead of this host's; None before its first
        answer.
        """
        return self._offset.bounds

    def delivered(self, told: heartbeat.PerformanceReport | None) -> None:
        """The server has it, or will never take it."""
        if told is not None and self._held is not None and told.number == self._held.number:
            self._held = None

    def answered(self, outcome: Outcome) -> None:
        """Learns from an exchange how far the server's clock is from this host's, and how often it
        wants to hear.
        """
        if outcome.reply is None:
            return
        self._interval_s = (
            EVERY_S
            if outcome.reply.interval_s <= USUAL_S
            else max(EVERY_S, BEATS * outcome.reply.interval_s)
        )
        if outcome.reply.clock_s is not None and outcome.back_s:
            self._offset.add_exchange(outcome.sent_s, outcome.reply.clock_s, outcome.back_s)
