"""Reads a ring, whose layout `hangwatch.ring.layout` documents, and trusts nothing in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hangwatch.model.calls import Call, SequenceKind, Signature, Site
from hangwatch.model.groups import Group

from .decoding import _age, _describe, _object, _signature, _site
from .layout import (
    FAULTS_AT,
    HEADER_SIZE,
    IDENTITY_AT,
    IDENTITY_SIZE,
    INTERNED,
    INTERNED_SIZE,
    LAST_WORDS_AT,
    LIVE_AT,
    MAGIC,
    MAX_FILE,
    NOTE,
    NOTE_SIZE,
    RECORD,
    SEQUENCE,
    TABLES,
    UNKNOWN,
    VERSION,
    Flag,
    Live,
    RingError,
)
from .snapshot import Entry, News, SequenceState, Snapshot

_BLOCKING, _ASYNC, _RAISED, _SHARED = map(int, (Flag.BLOCKING, Flag.ASYNC, Flag.RAISED, Flag.SHARED))  # an enum's own & is slow


_SIGNATURES_KEPT = 1024


_SEQ, _CHAIN, _COMPLETED, _UID, _SIGNATURE, _FLAGS = 3, 4, 5, 7, 8, 11  # fields of a record


_Kinds = dict[tuple[int, int], tuple[Signature, "Site | None"]]  # by the numbers of a signature and a site


@dataclass(slots=True)
class RingReader:
    """Reads a mapped ring. It trusts nothing: what does not check out is left out and counted, or raises RingError.

    ``data`` is anything that can be sliced like bytes, usually an mmap.
    """

    data: Any
    _descriptions: dict[int, tuple[SequenceKind, Group, int | None, int | None]] = field(default_factory=dict)
    _notes: dict[int, tuple[int, dict[str, Any]]] = field(default_factory=dict)  # where it stands -> its lock, what it said
    _known: dict[int, Signature] = field(default_factory=dict)  # a number is never given again
    _pid: int = 0
    _start_ticks: int = 0
    _sequences: tuple[int, int] = (0, 0)
    _records: tuple[int, int] = (0, 0)
    _signatures: tuple[int, int] = (0, 0)
    _sites: tuple[int, int] = (0, 0)
    _heap: tuple[int, int] = (0, 0)
    _size: int = 0

    def __post_init__(self) -> None:
        size = len(self.data)
        if size < HEADER_SIZE:
            raise RingError(f"truncated: {size} bytes, and the header alone takes {HEADER_SIZE}")
        magic, version, header, told, *rest = TABLES.unpack_from(self.data, 0)
        if magic != MAGIC:
            raise RingError(f"not a ring: it begins with {bytes(magic)!r}")
        if version != VERSION or header != HEADER_SIZE:
            raise RingError(f"written in layout {version}, and this hangwatch reads {VERSION}: install one version on the whole node")
        if told > MAX_FILE or told > size:
            raise RingError(f"truncated: {size} bytes of {told}")
        tables = [(rest[i], rest[i + 1]) for i in range(0, 10, 2)]
        strides = (SEQUENCE.size, RECORD.size, INTERNED_SIZE, INTERNED_SIZE, 1)
        for (at, count), stride in zip(tables, strides, strict=True):
            if at < HEADER_SIZE or count < 1 or at + count * stride > told:
                raise RingError(f"corrupt: a table of {count} x {stride} bytes at {at} lies outside the file")
        self._sequences, self._records, self._signatures, self._sites, self._heap = tables
        self._pid, _, self._start_ticks = rest[10], rest[11], rest[12]
        self._size = told

    def live(self, word: Live) -> int:
        return int.from_bytes(self.data[LIVE_AT + 8 * word : LIVE_AT + 8 * word + 8], "little")

    def snapshot(self, now_ns: int) -> Snapshot:
        """Everything but the calls. Raises RingError where the identity cannot be read."""
        identity = self._note(IDENTITY_AT, IDENTITY_SIZE)
        if identity is None:
            raise RingError("no identity in it: its process is still creating it, or died doing so")
        states: list[SequenceState] = []
        torn = 0
        polled, written = self.live(Live.RECORDS), self.written()
        newest = {
            record[_UID]: record for i in range(max(polled, written - self._records[1]), written) if (record := self.record(i)) is not None
        }
        for slot in range(min(self.live(Live.SEQUENCES), self._sequences[1])):
            state = self._sequence(slot, newest, now_ns)
            if isinstance(state, SequenceState):
                states.append(state)
            else:
                torn += state
        step = self.live(Live.STEP)
        faults = self._note(FAULTS_AT, NOTE_SIZE) or {}
        limit = self.live(Live.PHASE_LIMIT_NS)
        phase = self.live(Live.PHASE)
        named = self._interned(self._sites, phase) if phase else None
        return Snapshot(
            pid=self._pid,
            start_ticks=self._start_ticks,
            identity=identity,
            lifecycle=self.live(Live.LIFECYCLE),
            step=step - 1 if step else None,
            pulse_s=_age(now_ns, self.live(Live.PULSE_NS)),
            phase=str(named.get("phase")) if named else None,
            phase_s=_age(now_ns, self.live(Live.PHASE_NS)),
            phase_limit_s=limit / 1e9 if limit else None,
            records=written,
            dropped=self.live(Live.DROPPED),
            errors=self.live(Live.ERRORS),
            off=bool(self.live(Live.OFF)),
            sequences=tuple(states),
            last_words=self._note(LAST_WORDS_AT, NOTE_SIZE),
            faults=tuple(str(line) for line in faults.get("lines", ())),
            torn=torn,
        )

    def calls(self, uid: int, now_ns: int, *, most: int = 64, from_seq: int = 0) -> list[Call]:
        """The last calls of one sequence that are still in the ring, oldest first."""
        written, count = self.written(), self._records[1]
        found: list[Call] = []
        for index in range(written - 1, max(-1, written - count - 1), -1):
            record = self.record(index)
            if record is None or record[_UID] != uid:
                continue
            if record[_SEQ] < from_seq:
                break
            found.append(self._call(record, now_ns))
            if len(found) >= most:
                break
        found.reverse()
        return found

    def news(self, after: int) -> News:
        """All sequences' calls among the records from ``after`` on, as far as the ring still has them, in one pass."""
        written = self.written()
        chains: dict[int, dict[int, int]] = {}
        newest: dict[int, int] = {}
        shared: dict[int, int] = {}
        records: list[tuple[int, ...]] = []
        for index in range(max(after, written - self._records[1]), written):
            if (record := self.record(index)) is not None:
                chains.setdefault(record[_UID], {})[record[_SEQ]] = record[_CHAIN]
                newest[record[_UID]] = record[_SIGNATURE]
                records.append(record)
                if record[_FLAGS] & _SHARED:
                    shared.setdefault(record[_UID], record[_SEQ])
        ops = {uid: self.signature(number).op for uid, number in newest.items()}
        return News(upto=written, chains=chains, ops=ops, shared=shared, records=tuple(records))

    def signature(self, number: int) -> Signature:
        """What a record's signature number stands for."""
        found = self._known.get(number)
        if found is None:
            told = self._interned(self._signatures, number)
            found = _signature(told)
            if told is not None:
                if len(self._known) >= _SIGNATURES_KEPT:
                    self._known.clear()
                self._known[number] = found
        return found

    @property
    def capacity(self) -> int:
        """Records that the ring holds."""
        return self._records[1]

    def entries(self, after: int, now_ns: int) -> tuple[int, list[Entry | None]]:
        """The number of the first record from ``after`` on that the ring still has, and all from there on, oldest first.

        None stands for one that is being written, or that was overwritten while it was read.
        """
        written = self.written()
        first = max(after, written - self._records[1], 0)
        kinds: _Kinds = {}
        found: list[Entry | None] = []
        for index in range(first, written):
            if (record := self.record(index)) is None:
                found.append(None)
                continue
            completed = None if record[_COMPLETED] == UNKNOWN else record[_COMPLETED]
            found.append(Entry(index, record[_UID], record[1], completed, self._call(record, now_ns, kinds)))
        return first, found

    def tails(self, now_ns: int, *, most: int = 64) -> dict[int, list[Call]]:
        """The last calls of every sequence, oldest first, in one pass: for a process that has ended."""
        written, count = self.written(), self._records[1]
        kept: dict[int, list[Call]] = {}
        for index in range(written - 1, max(-1, written - count - 1), -1):
            record = self.record(index)
            if record is not None and len(calls := kept.setdefault(record[_UID], [])) < most:
                calls.append(self._call(record, now_ns))
        return {uid: calls[::-1] for uid, calls in kept.items()}

    def behind(self, stride: int) -> tuple[int, int]:
        """The table behind the heap, of entries of ``stride`` bytes: where it begins, and how many there are; 0 without one."""
        at = self._heap[0] + self._heap[1]
        return at, (self._size - at) // stride

    def told(self, seq: int, signature: int, site: int, **more: Any) -> Call:
        """A call of which the numbers of its signature and its site are known."""
        what, where = self._kind(signature, site)
        return Call(seq=seq, signature=what, site=where, **more)

    def _kind(self, signature: int, site: int) -> tuple[Signature, Site | None]:
        return self.signature(signature), _site(self._interned(self._sites, site) if site else None)

    def _note(self, at: int, room: int) -> dict[str, Any] | None:
        for _ in range(8):
            lock, length = NOTE.unpack_from(self.data, at)
            if lock % 2 or not length or length > room - NOTE.size:
                continue
            if (read := self._notes.get(at)) is not None and read[0] == lock:
                return read[1]
            raw = bytes(self.data[at + NOTE.size : at + NOTE.size + length])
            if NOTE.unpack_from(self.data, at)[0] == lock:
                if (found := _object(raw)) is not None:
                    self._notes[at] = lock, found
                return found
        return None

    def written(self) -> int:
        """How many records there are: the header's count is as old as the last poll."""
        written = self.live(Live.RECORDS)
        while (found := self._stamp(written)) > written:
            written = found
        return written

    def _stamp(self, index: int) -> int:
        """Index + 1 of the record in the slot of ``index``."""
        at = self._records[0] + (index % self._records[1]) * RECORD.size
        return int.from_bytes(self.data[at : at + 8], "little")

    def _sequence(self, slot: int, newest: dict[int, tuple[int, ...]], now_ns: int) -> SequenceState | int:
        """One sequence; else 1 where it was torn and 0 where the slot is free."""
        at = self._sequences[0] + slot * SEQUENCE.size
        for _ in range(8):
            values = SEQUENCE.unpack_from(self.data, at)
            completed, pending_ns, entered, chain, entered_ns, uid, length, offset = values
            if SEQUENCE.unpack_from(self.data, at) != values:
                continue
            if not uid:
                return 0
            described = self._description(uid, offset, length)
            if described is None:
                return 1
            if (record := newest.get(uid)) is not None and record[_SEQ] > entered:
                entered_ns, entered, chain = record[1], record[_SEQ], record[_CHAIN]
                completed = UNKNOWN if completed == UNKNOWN else max(completed, min(record[_COMPLETED], entered))
            pending = completed != UNKNOWN and completed < entered
            oldest_ns = entered_ns if completed + 1 == entered or not pending_ns else pending_ns
            kind, group, peer, tag = described
            return SequenceState(
                uid=uid,
                kind=kind,
                group=group,
                peer=peer,
                tag=tag,
                entered=entered,
                completed=None if completed == UNKNOWN else min(completed, entered),
                chain=chain,
                entered_s=_age(now_ns, entered_ns),
                pending_s=_age(now_ns, oldest_ns) if pending else None,
            )
        return 1

    def _description(self, uid: int, offset: int, length: int) -> tuple[SequenceKind, Group, int | None, int | None] | None:
        """Read once: a uid is never given again."""
        if uid not in self._descriptions:
            if length > self._heap[1] or offset > self._heap[1] - length:
                return None
            start = self._heap[0] + offset
            found = _object(bytes(self.data[start : start + length]))
            try:
                self._descriptions[uid] = _describe(found or {})
            except (KeyError, TypeError, ValueError):
                return None
        return self._descriptions[uid]

    def record(self, index: int) -> tuple[int, ...] | None:
        """One record; None while it is written, and once it is overwritten."""
        record = RECORD.unpack_from(self.data, self._records[0] + (index % self._records[1]) * RECORD.size)
        whole = record[0] == index + 1 and record[-1] == record[0] & 0xFFFFFFFF
        return record if whole and self._stamp(index) == index + 1 else None

    def _call(self, record: tuple[int, ...], now_ns: int, kinds: _Kinds | None = None) -> Call:
        """``kinds`` remembers what was read before of records like it."""
        _, entered_ns, done_ns, seq, chain, _, _, _, signature, site, thread, flags, _, _, _ = record
        kind = kinds.get((signature, site)) if kinds is not None else None
        if kind is None:
            kind = self._kind(signature, site)
            if kinds is not None:
                kinds[signature, site] = kind
        return Call(
            seq=seq,
            signature=kind[0],
            site=kind[1],
            chain=chain,
            entered_s=_age(now_ns, entered_ns),
            duration_s=max(0, done_ns - entered_ns) / 1e9 if done_ns else None,
            blocking=True if flags & _BLOCKING else False if flags & _ASYNC else None,
            thread=thread,
            raised=bool(flags & _RAISED),
        )

    def _interned(self, table: tuple[int, int], number: int) -> dict[str, Any] | None:
        at = table[0] + (number % table[1]) * INTERNED_SIZE
        found, length = INTERNED.unpack_from(self.data, at)
        if found != number or length > INTERNED_SIZE - INTERNED.size:
            return None
        raw = bytes(self.data[at + INTERNED.size : at + INTERNED.size + length])
        return _object(raw) if INTERNED.unpack_from(self.data, at)[0] == number else None
