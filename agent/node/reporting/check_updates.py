"""The results of one process's checks that the server has not acknowledged. Pure, except that it
reads the ring.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from hangwatch.model.calls import Call
from hangwatch.protocol.heartbeat import NonfiniteReport
from hangwatch.ring import checks
from hangwatch.ring.checks import CheckEntry
from hangwatch.ring.layout import CheckFlag
from hangwatch.ring.reader import RingReader
from hangwatch.ring.sampling import thin_checks

_MAX_PENDING_ENTRIES = 2048
# In one heartbeat. Of a busier stream, all ranks leave out the same calls.
_MAX_CHECKSUMS_PER_STREAM = 64
_MAX_NONFINITE_PER_HEARTBEAT = 64


@dataclass(slots=True)
class CheckHistory:
    """Entries of the check table, from reading until they are acknowledged."""

    cursor: int = 0  # entries of the table that were read
    overflows: int = 0
    _entry_count: int = 0
    _pending: deque[tuple[int, CheckEntry, Call | None]] = field(
        default_factory=lambda: deque(maxlen=_MAX_PENDING_ENTRIES)
    )

    def read_entries(self, reader: RingReader, now_ns: int) -> None:
        """Reads the entries that were added to the table since the last time."""
        new_entries, self.cursor = checks.read_check_entries(reader, self.cursor)
        for entry in new_entries:
            self.overflows = max(self.overflows, entry.overflows)
            if not entry.flags & (CheckFlag.CHECKSUM | CheckFlag.NONFINITE):
                continue
            call = None
            if entry.flags & CheckFlag.NONFINITE:
                call = checks.call_from_entry(reader, entry, now_ns)
            self._entry_count += 1
            self._pending.append((self._entry_count, entry, call))

    def build_update_fields(self, after_entry: int, now_ns: int) -> tuple[dict[str, Any], int]:
        """Fields of a `heartbeat.ProcessUpdate` for the entries after ``after_entry`` (none if
        there is no such entry), and the last entry that they include.
        """
        nonfinite: list[NonfiniteReport] = []
        checksum_entries: dict[int, list[CheckEntry]] = defaultdict(list)
        last_entry = after_entry
        for number, entry, call in self._pending:
            if number <= after_entry:
                continue
            if call is None:
                checksum_entries[entry.uid].append(entry)
            elif len(nonfinite) == _MAX_NONFINITE_PER_HEARTBEAT:
                break
            else:
                nonfinite.append(_make_nonfinite_report(entry, call, now_ns))
            last_entry = number
        if last_entry == after_entry:
            return {}, after_entry
        checksums: list[tuple[int, int, int, int]] = []
        for uid, entries in checksum_entries.items():
            kept_seqs = thin_checks([entry.seq for entry in entries], _MAX_CHECKSUMS_PER_STREAM)
            for entry in entries:
                if entry.seq in kept_seqs:
                    checksums.append((uid, entry.seq, entry.chain, entry.checksum))
        fields = {
            "checksums": tuple(checksums),
            "nonfinite": tuple(nonfinite),
            "overflows": self.overflows,
        }
        return fields, last_entry

    def mark_acked(self, upto_entry: int) -> None:
        while self._pending and self._pending[0][0] <= upto_entry:
            self._pending.popleft()

    def rewind_cursor(self) -> None:
        """Starts again with the entries that are still in the table."""
        self.cursor = 0
        self._pending.clear()


def _make_nonfinite_report(entry: CheckEntry, call: Call, now_ns: int) -> NonfiniteReport:
    return NonfiniteReport(
        uid=entry.uid,
        seq=entry.seq,
        nan=entry.nan,
        inf=entry.inf,
        output=bool(entry.flags & CheckFlag.OUTPUT),
        scaled=bool(entry.flags & CheckFlag.SCALED),
        first=entry.first,
        rounds=entry.rounds,
        at_s=round(max(0, now_ns - entry.entered_ns) / 1e9, 4),
        call=call,
    )
