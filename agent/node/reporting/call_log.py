"""The calls of one process that its ring no longer has. A ring holds some thousand calls, which a quick
job makes in a second; a difference between ranks may be found after that.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

from hangwatch.ring.layout import RecordFlag
from hangwatch.ring.parts import Record

CALLS_KEPT = 16_384  # for all streams of a process together: 720 kB
# seq, running hash, time of entry; uid, signature, site, thread, flags
_ENTRY = struct.Struct("<3Q5I")
_RAISED = int(RecordFlag.RAISED)


@dataclass(frozen=True, slots=True)
class LoggedCall:
    """One call, with the numbers of its signature and site in the ring."""

    seq: int
    chain: int
    entered_ns: int
    signature: int
    site: int
    thread: int
    raised: bool


@dataclass(slots=True)
class CallLog:
    """The last calls that were read from a ring, each once."""

    capacity: int = CALLS_KEPT
    _last_index: int = 0  # the newest record's, counted from 1
    _entries: bytearray = field(default_factory=bytearray)

    def __len__(self) -> int:
        return len(self._entries) // _ENTRY.size

    def add_records(self, records: Iterable[Record]) -> None:
        """Adds records in the order in which they were written; those that were added before are
        skipped.
        """
        pack = _ENTRY.pack
        packed: list[bytes] = []
        for record in records:
            (index, entered_ns, _, seq, chain, _, _, uid, signature, site, thread, flags, *_) = (
                record
            )
            if index > self._last_index:
                self._last_index = index
                packed.append(pack(seq, chain, entered_ns, uid, signature, site, thread, flags))
        self._entries += b"".join(packed)
        # Not at each reading: all that stay are moved.
        if len(self) > self.capacity * 5 // 4:
            del self._entries[: len(self._entries) - self.capacity * _ENTRY.size]

    def list_calls(self, uid: int, first: int, last: int, step: int = 1) -> list[LoggedCall]:
        """The calls of one stream from number ``first`` to ``last`` at multiples of ``step``."""
        return [
            LoggedCall(seq, chain, entered_ns, signature, site, thread, bool(flags & _RAISED))
            for seq, chain, entered_ns, entry_uid, signature, site, thread, flags in (
                _ENTRY.iter_unpack(self._entries)
            )
            if entry_uid == uid and first <= seq <= last and seq % step == 0
        ]
