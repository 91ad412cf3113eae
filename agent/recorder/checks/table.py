"""Writes the check table behind a ring's heap. `hangwatch.ring.layout` documents the table,
`hangwatch.ring.checks` reads it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hangwatch.ring.layout import CHECK_SLOTS, CHECK_STRUCT, RECORD_SLOTS, RECORD_STRUCT, CheckFlag

from ..streams import EnteredCall
from ..writer import RingWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCall:
    """The fields of a call's record that its check entries repeat, or that decide what to check."""

    entered_ns: int
    seq: int
    chain: int
    size: int
    uid: int
    signature: int
    site: int
    flags: int


class CheckTableWriter:
    def __init__(self, ring: RingWriter) -> None:
        self._ring = ring
        self._indices = itertools.count()  # atomic under the GIL: any thread may write

    def read_call(self, call: EnteredCall) -> CheckedCall:
        """Reads the record of a call that was just entered, and so still exists."""
        record = RECORD_STRUCT.unpack_from(
            self._ring.map,
            self._ring.records_offset + (call[2] % RECORD_SLOTS) * RECORD_STRUCT.size,
        )
        _, entered_ns, _, seq, chain, _, size, uid, signature, site, _, flags, _, _, _ = record
        return CheckedCall(
            entered_ns=entered_ns,
            seq=seq,
            chain=chain,
            size=size,
            uid=uid,
            signature=signature,
            site=site,
            flags=flags,
        )

    def write_check(
        self, call: CheckedCall, flags: CheckFlag, *, checksum: int = 0, nan: int = 0, inf: int = 0,
        stats: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0), first_seq: int = 0, rounds: int = 0, overflows: int = 0,
    ) -> None:  # fmt: skip
        index = next(self._indices)
        CHECK_STRUCT.pack_into(
            self._ring.map, self._ring.extra_offset + (index % CHECK_SLOTS) * CHECK_STRUCT.size,
            index + 1, call.entered_ns, call.seq, call.chain, checksum, nan, inf, first_seq, *stats,
            call.uid, call.signature, call.site, int(flags), rounds, overflows & 0xFFFFFFFF, 0, (index + 1) & 0xFFFFFFFF,
        )  # fmt: skip
