"""What the checks of one process found and the server has not acknowledged. Pure, but for the ring
that is read.
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

_MAX_PENDING_ENTRIES = 2048  # entries until they are acknowledged
# of one sequence in one heartbeat: what is left out of a busier one is left out on other ranks as
# well
_MAX_CHECKSUMS_PER_STREAM = 64
_MAX_NONFINITE_PER_HEARTBEAT = 64  # in one heartbeat


@dataclass(slots=True)
class CheckHistory:
    cursor: int = 0  # entries of the table taken in
    overflows: int = 0
    _entry_count: int = 0
    _pending: deque[tuple[int, CheckEntry, Call | None]] = field(
        default_factory=lambda: deque(maxlen=_MAX_PENDING_ENTRIES)
    )

    def read_entries(self, reader: RingReader, now_ns: int) -> None:
        """Reads on in the table."""
        fresh, self.cursor = checks.read_check_entries(reader, self.cursor)
        for entry in fresh:
            self.overflows = max(self.overflows, entry.overflows)
            if entry.flags & (CheckFlag.CHECKSUM | CheckFlag.NONFINITE):
                call = (
                    checks.call_from_entry(reader, entry, now_ns)
                    if entry.flags & CheckFlag.NONFINITE
                    else None
                )
                self._entry_count += 1
                self._pending.append((self._entry_count, entry, call))

    def build_update_fields(self, after_entry: int, now_ns: int) -> tuple[dict[str, Any], int]:
        """Fields of a `wire.ProcessUpdate`, none where there is nothing to tell, and up to which
        entry they tell.
        """
        told: list[NonfiniteReport] = []
        results: dict[int, list[CheckEntry]] = defaultdict(list)
        upto = after_entry
        for number, entry, call in self._pending:
            if number <= after_entry:
                continue
            if call is not None:
                if len(told) == _MAX_NONFINITE_PER_HEARTBEAT:
                    break
                told.append(_make_nonfinite_report(entry, call, now_ns))
            else:
                results[entry.uid].append(entry)
            upto = number
        if upto == after_entry:
            return {}, after_entry
        checksums: list[tuple[int, int, int, int]] = []
        for uid, found in results.items():
            kept = thin_checks([e.seq for e in found], _MAX_CHECKSUMS_PER_STREAM)
            checksums += [(uid, e.seq, e.chain, e.checksum) for e in found if e.seq in kept]
        return {
            "checksums": tuple(checksums),
            "nonfinite": tuple(told),
            "overflows": self.overflows,
        }, upto

    def mark_acked(self, upto_entry: int) -> None:
        while self._pending and self._pending[0][0] <= upto_entry:
            self._pending.popleft()

    def rewind_cursor(self) -> None:
        """Starts anew with what the table still has."""
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
