"""Reads the positions of streams: from the stream table, which the recorder updates when it polls,
and from the records written since.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from hangwatch.model.losses import Loss, LossReason

from .decoding import StreamDescription, compute_age_s, parse_description
from .layout import LOSS_STRUCT, STREAM_STRUCT, UNKNOWN_COMPLETED, LiveWord, RecordFlag, unpack_loss
from .parts import (
    CHAIN,
    COMPLETED,
    ENTERED_NS,
    FLAGS,
    READ_ATTEMPTS,
    SEQ,
    UID,
    Record,
    RingParts,
)
from .snapshot import StreamState, StreamStates

_RETRACTED = int(RecordFlag.RETRACTED)  # a plain integer: the & operator of an enum is slow

# A stream is dormant as long as all its calls are complete. Where completion is unknown, it is once
# its newest call is that old: by then the call has been reported as one that may be unfinished.
DORMANT_AFTER_S = 10.0
_CHUNK_SLOTS = 16


@dataclass(slots=True)
class _Chunk:
    """Adjacent slots. ``dormant`` are their streams if all are dormant, as long as ``content`` stays the
    same.
    """

    content: tuple[bytes, bytes] = (b"", b"")
    dormant: tuple[StreamState, ...] | None = None


class StreamTable:
    """The stream table of a ring. Descriptions are cached, because uids are not reused, and so are the
    states of dormant streams: a process may have thousands of channels, of which it uses a few.
    """

    __slots__ = (
        "_chunks",
        "_chunks_by_uid",
        "_descriptions",
        "_dormant",
        "_dormant_chunks",
        "_losses_offset",
        "_parts",
    )

    def __init__(self, parts: RingParts) -> None:
        self._parts = parts
        self._descriptions: dict[int, StreamDescription] = {}  # by uid
        self._losses_offset = 0  # 0: not known yet, or there is none
        self._chunks: list[_Chunk] = []
        self._chunks_by_uid: dict[int, int] = {}
        self._dormant: tuple[StreamState, ...] = ()
        self._dormant_chunks: tuple[tuple[StreamState, ...], ...] = ()

    def read_streams(self, written: int, now_ns: int) -> StreamStates:
        """All streams. ``written`` is the number of records written so far."""
        newest_records = self._read_newest_records(written)
        slot_count = min(self._parts.read_live_word(LiveWord.SEQUENCES), self._parts.streams.count)
        contents = self._copy_chunks(slot_count)
        self._chunks += [_Chunk() for _ in range(len(contents) - len(self._chunks))]
        called = {self._chunks_by_uid.get(uid) for uid in newest_records}
        active: list[StreamState] = []
        torn_count = 0
        has_changed = False
        for number, (chunk, content) in enumerate(zip(self._chunks, contents, strict=False)):
            if chunk.dormant is not None and chunk.content == content and number not in called:
                continue
            states: list[StreamState] = []
            first = number * _CHUNK_SLOTS
            for slot in range(first, min(first + _CHUNK_SLOTS, slot_count)):
                state = self._read_stream(slot, newest_records, now_ns)
                if isinstance(state, StreamState):
                    states.append(state)
                    self._chunks_by_uid[state.uid] = number
                else:
                    torn_count += state
            has_changed |= chunk.dormant is not None
            chunk.content, chunk.dormant = content, None
            if all(map(_is_dormant, states)) and not torn_count:
                chunk.dormant, has_changed = tuple(states), True
            else:
                active += states
        if has_changed:
            self._dormant_chunks = tuple([chunk.dormant or () for chunk in self._chunks])
            self._dormant = tuple(chain.from_iterable(self._dormant_chunks))
            self._forget_closed_streams(active)
        return StreamStates(tuple(active), self._dormant, self._dormant_chunks, torn_count)

    def _copy_chunks(self, slot_count: int) -> list[tuple[bytes, bytes]]:
        """The bytes of the slots and of their losses, by chunk."""
        data, start = self._parts.data, self._parts.streams.offset
        slots = bytes(data[start : start + slot_count * STREAM_STRUCT.size])
        losses = b""
        if losses_offset := self._find_losses():
            losses = bytes(data[losses_offset : losses_offset + slot_count * LOSS_STRUCT.size])
        slot_bytes = _CHUNK_SLOTS * STREAM_STRUCT.size
        loss_bytes = _CHUNK_SLOTS * LOSS_STRUCT.size
        return [
            (
                slots[number * slot_bytes : (number + 1) * slot_bytes],
                losses[number * loss_bytes : (number + 1) * loss_bytes],
            )
            for number in range(-(-slot_count // _CHUNK_SLOTS))
        ]

    def _forget_closed_streams(self, active: list[StreamState]) -> None:
        """Drops what is cached of them, once that is about half."""
        known_count = len(active) + len(self._dormant)
        if len(self._descriptions) > 2 * known_count + 2 * _CHUNK_SLOTS:
            known = {state.uid for state in (*active, *self._dormant)}
            for cache in (self._descriptions, self._chunks_by_uid):
                for uid in cache.keys() - known:
                    del cache[uid]

    def _read_newest_records(self, written: int) -> dict[int, Record]:
        """By uid: the newest record since the last poll."""
        polled = self._parts.read_live_word(LiveWord.RECORDS)
        return {
            record[UID]: record
            for record in self._parts.read_records(polled, written)
            if not record[FLAGS] & _RETRACTED
        }

    def _read_stream(
        self, slot: int, newest_records: dict[int, Record], now_ns: int
    ) -> StreamState | int:
        """One stream; otherwise the number of torn parts: 1 if it is torn, 0 if the slot is free."""
        data, offset = self._parts.data, self._parts.streams.offset + slot * STREAM_STRUCT.size
        for _ in range(READ_ATTEMPTS):
            values = STREAM_STRUCT.unpack_from(data, offset)
            if STREAM_STRUCT.unpack_from(data, offset) != values:
                continue
            uid, length, heap_offset = values[5:]
            if not uid:
                return 0
            description = self._read_description(uid, heap_offset, length)
            if description is None:
                return 1
            loss = self._read_loss(slot)
            if STREAM_STRUCT.unpack_from(data, offset)[5] != uid:
                continue  # another stream has taken the slot
            return _make_state(uid, description, values, newest_records.get(uid), loss, now_ns)
        return 1

    def _find_losses(self) -> int:
        """The offset of the loss table; 0 if there is none."""
        if not self._losses_offset:
            self._losses_offset = self._parts.read_live_word(LiveWord.LOSSES)
        end = self._losses_offset + self._parts.streams.count * LOSS_STRUCT.size
        return self._losses_offset if end <= self._parts.records.offset else 0

    def _read_loss(self, slot: int) -> Loss | None:
        losses_offset = self._find_losses()
        if not losses_offset:
            return None
        at = losses_offset + slot * LOSS_STRUCT.size
        from_seq, reason = unpack_loss(LOSS_STRUCT.unpack_from(self._parts.data, at)[0])
        return Loss(from_seq, LossReason.from_number(reason)) if from_seq else None

    def _read_description(self, uid: int, offset: int, length: int) -> StreamDescription | None:
        description = self._descriptions.get(uid)
        if description is None:
            data = self._parts.read_heap(offset, length)
            description = parse_description(data) if data else None
            if description is not None:
                self._descriptions[uid] = description
        return description


def _make_state(
    uid: int,
    description: StreamDescription,
    values: tuple[int, ...],
    newest: Record | None,
    loss: Loss | None,
    now_ns: int,
) -> StreamState:
    """``values`` is the stream's slot, ``newest`` its newest record since the slot was updated."""
    completed, pending_ns, entered, chain, entered_ns = values[:5]
    if newest is not None and newest[SEQ] > entered:
        entered_ns, entered, chain = newest[ENTERED_NS], newest[SEQ], newest[CHAIN]
        if completed != UNKNOWN_COMPLETED:
            completed = max(completed, min(newest[COMPLETED], entered))
    is_pending = completed != UNKNOWN_COMPLETED and completed < entered
    oldest_ns = entered_ns if completed + 1 == entered or not pending_ns else pending_ns
    return StreamState(
        uid=uid,
        kind=description.kind,
        group=description.group,
        peer=description.peer,
        tag=description.tag,
        entered=entered,
        completed=None if completed == UNKNOWN_COMPLETED else min(completed, entered),
        chain=chain,
        entered_s=compute_age_s(now_ns, entered_ns),
        pending_s=compute_age_s(now_ns, oldest_ns) if is_pending else None,
        loss=loss,
        read_ns=now_ns,
    )


def _is_dormant(state: StreamState) -> bool:
    if state.completed is not None or not state.entered:
        return state.pending_s is None
    return state.entered_s >= DORMANT_AFTER_S
