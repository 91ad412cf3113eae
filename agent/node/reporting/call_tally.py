"""Adds up how the calls of one process perform, from the records in its ring."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hangwatch.model.calls import StreamKind
from hangwatch.performance.distributions import (
    MAX_DURATION_US,
    MUTUAL_WAIT_OPS,
    DurationHistogram,
    full_size,
    is_even_split,
    size_class,
)
from hangwatch.protocol import heartbeat
from hangwatch.ring.layout import RecordFlag
from hangwatch.ring.reader import RingReader
from hangwatch.ring.sampling import MIN_TIMED_LEVEL, sample_calls, sampling_level
from hangwatch.ring.snapshot import StreamState

SAMPLES_BY_GROUP_SIZE = (
    (64, 16),
    (512, 8),
    (1 << 20, 2),
)  # calls of a group that are compared in a report, by its size up to so many members

_MAX_ARRIVALS = 64  # arrivals of a sequence before they are thinned

_MAX_UNFINISHED_CALLS = 1024  # timed calls that are not over, of a process

_MAX_LATER_CALLS, _MAX_DURATION_WAIT_NS = (
    64,
    5_000_000_000,
)  # later calls of its sequence, and time, by which a timed one is over or will not be told of

_MAX_CALL_SHAPES = 4096  # kinds of calls

# fields of a record
_ENTERED, _COMPLETED, _SEQ, _BYTES, _UID, _SIGNATURE, _FLAGS = 1, 2, 3, 6, 7, 8, 11

_TIMED_FLAG, _RAISED_FLAG = int(RecordFlag.TIMED), int(RecordFlag.RAISED)  # an enum's own & is slow


@dataclass(frozen=True, slots=True)
class _CallShape:
    """Calls with one signature."""

    op: str
    size_bytes: int  # bytes, as nccl-tests count them
    is_even: bool  # the same on every rank


@dataclass(slots=True)
class _SizeClassTotals:
    """Calls of one operation and size class, since the last report."""

    call_count: int = 0
    total_bytes: int = 0
    latency: DurationHistogram = field(default_factory=DurationHistogram)


@dataclass(slots=True)
class _CallArrival:
    """At a call that is compared. In nanoseconds, -1: not known."""

    entered_ns: int
    since_previous_ns: int  # the call before it
    shape: _CallShape
    took_ns: int = -1


@dataclass(slots=True)
class _StreamTally:
    """Of one sequence, since the last report."""

    samples_per_report: int  # calls in a report; 0: there is nobody to compare with
    member_count: int
    last_seq: int = 0  # the newest call that was read
    last_ns: int = 0  # when it was entered
    missed_count: int = 0
    timed_ops: set[str] = field(
        default_factory=set
    )  # operations of which some calls have told when they were over
    totals_by_class: dict[tuple[str, int], _SizeClassTotals] = field(default_factory=dict)
    arrivals: dict[int, _CallArrival] = field(default_factory=dict)  # by seq
    thinning_level: int = 0  # to this level

    def get_totals(self, shape: _CallShape) -> _SizeClassTotals:
        at = shape.op, size_class(shape.size_bytes)
        found = self.totals_by_class.get(at)
        if found is None:
            found = self.totals_by_class[at] = _SizeClassTotals()
        return found


@dataclass(slots=True)
class ProcessTally:
    """Of one process."""

    _record_cursor: int = 0  # records taken in
    _streams: dict[int, _StreamTally] = field(default_factory=dict)  # by sequence
    _shapes: dict[tuple[int, int, int], _CallShape] = field(
        default_factory=dict
    )  # by size of the group, signature and bytes
    _unfinished: dict[int, tuple[int, int, int, _CallShape]] = field(
        default_factory=dict
    )  # record -> sequence, seq, entered_ns

    def add_records(
        self, records: Iterable[tuple[int, ...]], states: Sequence[StreamState], reader: RingReader
    ) -> None:
        """Takes in what was recorded since the last time. Records that come again are left out."""
        self._recheck_unfinished(reader)
        fresh = [record for record in records if record[0] > self._record_cursor]
        if not fresh:
            return
        self._record_cursor = fresh[-1][0]
        known = {state.uid: state for state in states}
        for record in fresh:
            uid, seq = record[_UID], record[_SEQ]
            calls = self._streams.get(uid)
            if calls is None:
                if uid not in known or known[uid].kind is StreamKind.SETUP:
                    continue
                calls = self._streams[uid] = _make_stream_tally(known[uid], seq)
            calls.missed_count += max(0, seq - calls.last_seq - 1)
            since = (
                record[_ENTERED] - calls.last_ns
                if seq == calls.last_seq + 1 and calls.last_ns
                else -1
            )
            calls.last_seq, calls.last_ns = max(calls.last_seq, seq), record[_ENTERED]
            kind = self._find_shape(record, calls, reader)
            row = calls.get_totals(kind)
            row.call_count += 1
            row.total_bytes += kind.size_bytes
            high = sampling_level(seq)
            if (
                calls.samples_per_report
                and high >= calls.thinning_level
                and kind.op in MUTUAL_WAIT_OPS
            ):
                calls.arrivals[seq] = _CallArrival(record[_ENTERED], max(-1, since), kind)
                while len(calls.arrivals) > _MAX_ARRIVALS:
                    calls.thinning_level += 1
                    calls.arrivals = {
                        s: a
                        for s, a in calls.arrivals.items()
                        if sampling_level(s) >= calls.thinning_level
                    }
            if high >= MIN_TIMED_LEVEL:
                self._record_duration(record, uid, seq, record[_ENTERED], kind)

    def build_report(self, key: str) -> list[heartbeat.StreamPerformance]:
        """What there is to say since the last time, all of it."""
        found = []
        for uid, calls in self._streams.items():
            if calls.totals_by_class:
                totals = tuple(
                    heartbeat.CallTotals(
                        op=op, size=size, calls=row.call_count, bytes=row.total_bytes,
                        latency=tuple(row.latency.counts.items()), longest_us=round(row.latency.longest_us),
                    )
                    for (op, size), row in calls.totals_by_class.items()
                )  # fmt: skip
                samples = self._select_samples(uid, calls)
                found.append(
                    heartbeat.StreamPerformance(
                        key=key, uid=uid, totals=totals, samples=samples, missed=calls.missed_count
                    )
                )
                calls.totals_by_class, calls.missed_count = {}, 0
        return found

    def _select_samples(self, uid: int, calls: _StreamTally) -> tuple[heartbeat.CallSample, ...]:
        """Those whose durations may still come wait for them."""
        waiting = [
            seq
            for its, seq, entered, kind in self._unfinished.values()
            if its == uid
            and kind.op in calls.timed_ops
            and calls.last_seq - seq < _MAX_LATER_CALLS
            and calls.last_ns - entered < _MAX_DURATION_WAIT_NS
        ]
        upto = min(waiting, default=calls.last_seq + 1)
        ready = sorted(seq for seq in calls.arrivals if seq < upto)
        chosen = sample_calls(ready, calls.samples_per_report)
        told = [(seq, calls.arrivals[seq]) for seq in chosen]
        calls.arrivals = {seq: arrival for seq, arrival in calls.arrivals.items() if seq >= upto}
        calls.thinning_level = 0
        return tuple(
            (
                seq, a.entered_ns // 1000, -1 if a.since_previous_ns < 0 else a.since_previous_ns // 1000, -1 if a.took_ns < 0 else a.took_ns // 1000,
                a.shape.op, size_class(a.shape.size_bytes), a.shape.size_bytes if a.shape.is_even else -1,
            )
            for seq, a in told
        )  # fmt: skip

    def _recheck_unfinished(self, reader: RingReader) -> None:
        """At timed calls that were not over when they were read."""
        for index, (uid, seq, entered, kind) in list(self._unfinished.items()):
            record = reader.read_record(index)
            if record is None:
                del self._unfinished[index]
            elif record[_FLAGS] & _TIMED_FLAG and record[_COMPLETED]:
                del self._unfinished[index]
                self._record_duration(record, uid, seq, entered, kind)

    def _record_duration(
        self, record: tuple[int, ...], uid: int, seq: int, entered_ns: int, shape: _CallShape
    ) -> None:
        calls = self._streams[uid]
        if not (record[_FLAGS] & _TIMED_FLAG and record[_COMPLETED]):
            if len(self._unfinished) < _MAX_UNFINISHED_CALLS and not record[_FLAGS] & _RAISED_FLAG:
                self._unfinished[record[0] - 1] = uid, seq, entered_ns, shape
            return
        took = min(max(0, record[_COMPLETED] - entered_ns), int(MAX_DURATION_US * 1000))
        calls.timed_ops.add(shape.op)
        calls.get_totals(shape).latency.add_duration(took / 1000)
        if seq in calls.arrivals:
            calls.arrivals[seq].took_ns = took

    def _find_shape(
        self, record: tuple[int, ...], calls: _StreamTally, reader: RingReader
    ) -> _CallShape:
        at = (calls.member_count, record[_SIGNATURE], record[_BYTES])
        found = self._shapes.get(at)
        if found is None:
            if len(self._shapes) >= _MAX_CALL_SHAPES:
                self._shapes.clear()
            signature = reader.read_signature(record[_SIGNATURE])
            found = _CallShape(
                signature.op,
                full_size(signature.op, record[_BYTES], calls.member_count),
                is_even_split(signature),
            )
            self._shapes[at] = found
        return found


def _make_stream_tally(state: StreamState, seq: int) -> _StreamTally:
    members = max(1, len(state.group.ranks))
    alike = state.kind is StreamKind.COLLECTIVE and members > 1
    compared = (
        next(most for ranks, most in SAMPLES_BY_GROUP_SIZE if members <= ranks) if alike else 0
    )
    return _StreamTally(samples_per_report=compared, member_count=members, last_seq=seq - 1)
