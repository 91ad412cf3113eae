"""What is kept of the calls in a ring's records: how they perform, and the last calls themselves.

`ProcessTally` adds up the calls of one process, and `PerformanceReporter` reports those of all ranks
every few seconds. `CallLog` keeps calls that the ring no longer has: a ring holds some thousand calls,
which a quick job makes in a second, and a difference between ranks may be found after that.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hangwatch.model.bounds import MAX_DURATION_US
from hangwatch.model.calls import Call, StreamKind
from hangwatch.performance.distributions import (
    MUTUAL_WAIT_OPS,
    DurationHistogram,
    full_size,
    is_even_split,
    size_class,
)
from hangwatch.protocol import heartbeat
from hangwatch.protocol.heartbeat import ClockOffset
from hangwatch.ring.layout import RecordFlag
from hangwatch.ring.parts import DONE_NS, ENTERED_NS, FLAGS, SEQ, STAMP, UID, Record, compute_age_s
from hangwatch.ring.reader import RingReader, StreamState
from hangwatch.ring.sampling import MIN_TIMED_LEVEL, sample_calls, sampling_level

from .uplink import HeartbeatOutcome

# (members of a group at most, calls of the group that are compared in one report)
SAMPLES_BY_GROUP_SIZE = ((64, 16), (512, 8), (1 << 20, 2))

_MAX_SAMPLES = 64  # more samples of a stream are thinned
_MAX_UNFINISHED_CALLS = 1024  # timed calls of a process that have not completed
_MAX_CALL_SHAPES = 4096
_MIN_STREAMS_DROPPED = 256  # closed streams that are dropped together

# A sampled call is reported without its duration after this many later calls of its stream, or
# after this time.
_MAX_LATER_CALLS = 64
_MAX_DURATION_WAIT_NS = 5_000_000_000
_MAX_DURATION_NS = int(MAX_DURATION_US * 1000)

# Flags are plain integers here, since `&` of an enum is slow.
_TIMED_FLAG = int(RecordFlag.TIMED)
_RAISED_FLAG = int(RecordFlag.RAISED)

REPORT_INTERVAL_S = 2.0

# Reports are further apart than usual if heartbeats are, since the server is busy.
USUAL_HEARTBEAT_INTERVAL_S = 0.5
HEARTBEATS_PER_REPORT = 8

MAX_STREAMS_PER_REPORT = 512  # the others follow in the next report

CALLS_KEPT = 16_384  # the limit of one process: 720 kB
# Sequence number, running hash, time of entry; uid, signature, site, thread, flags
_ENTRY = struct.Struct("<3Q5I")


@dataclass(frozen=True, slots=True)
class _CallShape:
    """What calls of one signature and size have in common."""

    op: str
    size_bytes: int  # the size that nccl-tests would print
    is_even: bool  # the size is the same on every rank
    totals_key: tuple[str, int]  # operation and size class


@dataclass(slots=True)
class _SizeClassTotals:
    call_count: int = 0
    total_bytes: int = 0
    latency: DurationHistogram = field(default_factory=DurationHistogram)


@dataclass(slots=True)
class _StreamTally:
    samples_per_report: int  # calls that are compared in a report; 0: none, as it has no peers
    member_count: int
    last_seq: int  # the newest call that was read
    last_ns: int = 0  # when it was entered
    missed_count: int = 0
    timed_ops: set[str] = field(default_factory=set)  # a call of each has a known duration
    totals_by_class: dict[tuple[str, int], _SizeClassTotals] = field(
        default_factory=lambda: defaultdict(_SizeClassTotals)
    )
    samples: dict[int, heartbeat.CallSample] = field(default_factory=dict)  # keys: seq
    thinning_level: int = 0  # samples of a lower sampling level are not kept


@dataclass(slots=True)
class ProcessTally:
    """How the calls of one process performed since the last report."""

    _streams: dict[int, _StreamTally] = field(default_factory=dict)  # keys: uids
    # Keys: group size, signature and bytes.
    _shapes: dict[tuple[int, int, int], _CallShape] = field(default_factory=dict)
    # Timed calls that had not completed when they were read, by the index of the record.
    _unfinished: dict[int, tuple[Record, _CallShape]] = field(default_factory=dict)

    def add_records(
        self, new_records: Iterable[Record], states: Sequence[StreamState], reader: RingReader
    ) -> None:
        """Adds records that were not added before, and the durations that have become known."""
        for index, (_, shape) in list(self._unfinished.items()):
            del self._unfinished[index]
            present = reader.read_record(index)
            if present is not None:
                self._record_duration(present, shape)
        states_by_uid: dict[int, StreamState] | None = None
        for record in new_records:
            uid = record[UID]
            stream = self._streams.get(uid)
            if stream is None:
                if states_by_uid is None:
                    states_by_uid = {state.uid: state for state in states}
                state = states_by_uid.get(uid)
                if state is None or state.loss is not None or state.kind is StreamKind.SETUP:
                    continue
                member_count = max(1, len(state.group.ranks))
                sample_count = 0
                if state.kind is StreamKind.COLLECTIVE and member_count > 1:
                    sample_count = next(
                        n for most, n in SAMPLES_BY_GROUP_SIZE if member_count <= most
                    )
                stream = _StreamTally(sample_count, member_count, last_seq=record[SEQ] - 1)
                self._streams[uid] = stream
            self._add_record(record, stream, reader)
        if states_by_uid is None:
            return
        # Streams that are closed and reported are dropped once there are many.
        if len(self._streams) > 2 * len(states_by_uid) + _MIN_STREAMS_DROPPED:
            self._streams = {
                uid: stream
                for uid, stream in self._streams.items()
                if uid in states_by_uid or stream.totals_by_class
            }
            for index, (record, _) in list(self._unfinished.items()):
                if record[UID] not in self._streams:
                    del self._unfinished[index]

    def _add_record(self, record: Record, stream: _StreamTally, reader: RingReader) -> None:
        _, entered_ns, _, seq, _, _, size, _, signature, *_ = record
        since_previous_us = -1
        expected_seq = stream.last_seq + 1
        if seq > expected_seq:
            stream.missed_count += seq - expected_seq
        elif seq == expected_seq and stream.last_ns:
            since_previous_us = max(-1, (entered_ns - stream.last_ns) // 1000)
        stream.last_seq = max(stream.last_seq, seq)
        stream.last_ns = entered_ns
        shape_key = stream.member_count, signature, size
        shape = self._shapes.get(shape_key)
        if shape is None:
            if len(self._shapes) >= _MAX_CALL_SHAPES:
                self._shapes.clear()
            decoded = reader.read_signature(signature)
            size_bytes = full_size(decoded.op, size, stream.member_count)
            totals_key = decoded.op, size_class(size_bytes)
            shape = _CallShape(decoded.op, size_bytes, is_even_split(decoded), totals_key)
            self._shapes[shape_key] = shape
        totals = stream.totals_by_class[shape.totals_key]
        totals.call_count += 1
        totals.total_bytes += shape.size_bytes
        level = sampling_level(seq)
        is_sampled = stream.samples_per_report and level >= stream.thinning_level
        if is_sampled and shape.op in MUTUAL_WAIT_OPS:
            common_bytes = shape.size_bytes if shape.is_even else -1
            entered_us = entered_ns // 1000
            sample = (seq, entered_us, since_previous_us, -1, *shape.totals_key, common_bytes)
            stream.samples[seq] = sample
            while len(stream.samples) > _MAX_SAMPLES:
                stream.thinning_level += 1
                for kept_seq in list(stream.samples):
                    if sampling_level(kept_seq) < stream.thinning_level:
                        del stream.samples[kept_seq]
        if level >= MIN_TIMED_LEVEL:
            self._record_duration(record, shape)

    def _record_duration(self, record: Record, shape: _CallShape) -> None:
        flags, done_ns = record[FLAGS], record[DONE_NS]
        if not (flags & _TIMED_FLAG and done_ns):
            if len(self._unfinished) < _MAX_UNFINISHED_CALLS and not flags & _RAISED_FLAG:
                self._unfinished[record[STAMP] - 1] = record, shape
            return
        stream = self._streams[record[UID]]
        took_ns = max(0, min(done_ns - record[ENTERED_NS], _MAX_DURATION_NS))
        stream.timed_ops.add(shape.op)
        stream.totals_by_class[shape.totals_key].latency.add_duration(took_ns / 1000)
        sample = stream.samples.get(record[SEQ])
        if sample is not None:
            stream.samples[record[SEQ]] = (*sample[:3], took_ns // 1000, *sample[4:])

    def build_report(self, key: str) -> list[heartbeat.StreamPerformance]:
        """Everything since the last report, by stream; the next report starts from zero."""
        parts = []
        for uid, stream in self._streams.items():
            if not stream.totals_by_class:
                continue
            totals = [
                heartbeat.CallTotals(
                    op=op,
                    size=size,
                    calls=kept.call_count,
                    bytes=kept.total_bytes,
                    latency=tuple(kept.latency.counts.items()),
                    longest_us=round(kept.latency.longest_us),
                )
                for (op, size), kept in stream.totals_by_class.items()
            ]
            # Calls from the first one on whose duration may still become known are kept for the
            # next report. Earlier ones are compared, or dropped if they are not chosen.
            end_seq = stream.last_seq + 1
            for record, shape in self._unfinished.values():
                if record[UID] != uid or shape.op not in stream.timed_ops:
                    continue
                is_recent = stream.last_seq - record[SEQ] < _MAX_LATER_CALLS
                if is_recent and stream.last_ns - record[ENTERED_NS] < _MAX_DURATION_WAIT_NS:
                    end_seq = min(end_seq, record[SEQ])
            ready = sorted(seq for seq in stream.samples if seq < end_seq)
            chosen = sample_calls(ready, stream.samples_per_report)
            part = heartbeat.StreamPerformance(
                key=key,
                uid=uid,
                totals=tuple(totals),
                samples=tuple([stream.samples[seq] for seq in chosen]),
                missed=stream.missed_count,
            )
            parts.append(part)
            for seq in ready:
                del stream.samples[seq]
            stream.totals_by_class.clear()
            stream.thinning_level = stream.missed_count = 0
        return parts


@dataclass(slots=True)
class PerformanceReporter:
    """Makes reports in sequence. Each report is repeated until it is acknowledged."""

    # The bounds of how far the server's clock is ahead of this host's
    clock_offset: ClockOffset = field(default_factory=ClockOffset)
    _report_number: int = 0
    _unacked_report: heartbeat.PerformanceReport | None = None
    _backlog: list[heartbeat.StreamPerformance] = field(default_factory=list)
    _next_report_ns: int = 0
    _report_interval_s: float = REPORT_INTERVAL_S

    def next_report(
        self, now_ns: int, tallies: Mapping[str, ProcessTally], *, flush: bool = False
    ) -> heartbeat.PerformanceReport | None:
        """The report for this heartbeat: the unacknowledged one, or a new one if it is due."""
        if self._unacked_report is not None:
            return self._unacked_report
        if now_ns < self._next_report_ns and not flush:
            return None
        self._next_report_ns = now_ns + int(self._report_interval_s * 1e9)
        if not self._backlog:
            for key, tally in tallies.items():
                self._backlog.extend(tally.build_report(key))
        if self._backlog:
            self._report_number += 1
            parts = self._backlog[:MAX_STREAMS_PER_REPORT]
            self._backlog = self._backlog[MAX_STREAMS_PER_REPORT:]
            self._unacked_report = heartbeat.PerformanceReport(
                number=self._report_number, clock=self.clock_offset.bounds, streams=tuple(parts)
            )
        return self._unacked_report

    def mark_delivered(self) -> None:
        """The server has the last report, or will never accept it."""
        self._unacked_report = None

    def apply_outcome(self, outcome: HeartbeatOutcome) -> None:
        """Updates the offset of the server's clock, and the interval between reports."""
        reply = outcome.reply
        if reply is None:
            return
        interval_s = REPORT_INTERVAL_S
        if reply.interval_s > USUAL_HEARTBEAT_INTERVAL_S:
            interval_s = max(interval_s, HEARTBEATS_PER_REPORT * reply.interval_s)
        self._report_interval_s = interval_s
        if reply.clock_s is not None and outcome.answered_s:
            self.clock_offset.add_exchange(outcome.sent_s, reply.clock_s, outcome.answered_s)


@dataclass(slots=True)
class CallLog:
    """The last calls that were read from a ring."""

    _entries: bytearray = field(default_factory=bytearray)

    def __len__(self) -> int:
        return len(self._entries) // _ENTRY.size

    def add_records(self, records: Iterable[Record]) -> None:
        """Adds new records in the order in which they were written."""
        pack = _ENTRY.pack
        packed = []
        for record in records:
            _, entered_ns, _, seq, chain, _, _, uid, signature, site, thread, flags, *_ = record
            packed.append(pack(seq, chain, entered_ns, uid, signature, site, thread, flags))
        self._entries += b"".join(packed)
        # The oldest are not dropped at each reading, since that moves all others.
        if len(self) > CALLS_KEPT * 5 // 4:
            del self._entries[: len(self._entries) - CALLS_KEPT * _ENTRY.size]

    def remove_call(self, uid: int, seq: int) -> None:
        """Removes the newest call of a stream, which was retracted."""
        for at in range(len(self._entries) - _ENTRY.size, -1, -_ENTRY.size):
            entry = _ENTRY.unpack_from(self._entries, at)
            if entry[3] == uid:
                if entry[0] == seq:
                    del self._entries[at : at + _ENTRY.size]
                return

    def list_calls(
        self, reader: RingReader, now_ns: int, uid: int, first: int, last: int, step: int
    ) -> list[Call]:
        """The calls of one stream from number ``first`` to ``last`` at multiples of ``step``."""
        calls = []
        for entry in _ENTRY.iter_unpack(self._entries):
            seq, chain, entered_ns, entry_uid, signature, site, thread, flags = entry
            if entry_uid == uid and first <= seq <= last and seq % step == 0:
                call = reader.make_call(
                    seq,
                    signature,
                    site,
                    chain=chain,
                    entered_s=compute_age_s(now_ns, entered_ns),
                    thread=thread,
                    raised=bool(flags & _RAISED_FLAG),
                )
                calls.append(call)
        return calls
