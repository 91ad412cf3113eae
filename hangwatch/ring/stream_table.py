"""Reads the positions of streams: from the stream table, which the recorder updates when it polls,
and from the records written since.
"""

from __future__ import annotations

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
from .snapshot import StreamState

_RETRACTED = int(RecordFlag.RETRACTED)  # a plain integer: the & operator of an enum is slow


class StreamTable:
    """The stream table of a ring. Descriptions are cached, because uids are not reused."""

    __slots__ = ("_descriptions", "_losses_offset", "_parts")

    def __init__(self, parts: RingParts) -> None:
        self._parts = parts
        self._descriptions: dict[int, StreamDescription] = {}  # by uid
        self._losses_offset = 0  # 0: not known yet, or there is none

    def read_streams(self, written: int, now_ns: int) -> tuple[list[StreamState], int]:
        """All streams, and the number of those left out because they kept changing or are invalid.

        ``written`` is the number of records written so far.
        """
        newest_records = self._read_newest_records(written)
        slot_count = min(self._parts.read_live_word(LiveWord.SEQUENCES), self._parts.streams.count)
        states: list[StreamState] = []
        torn_count = 0
        for slot in range(slot_count):
            state = self._read_stream(slot, newest_records, now_ns)
            if isinstance(state, StreamState):
                states.append(state)
            else:
                torn_count += state
        return states, torn_count

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

    def _read_loss(self, slot: int) -> Loss | None:
        if not self._losses_offset:
            self._losses_offset = self._parts.read_live_word(LiveWord.LOSSES)
        at = self._losses_offset + slot * LOSS_STRUCT.size
        if not self._losses_offset or at + LOSS_STRUCT.size > self._parts.records.offset:
            return None
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
    )
