"""Reads the check table behind a ring's heap, which holds the results of `HANGWATCH_CHECKS`.

`hangwatch.ring.layout` documents the layout. One call may have two entries: one for the rank's
input and one for the result. A ring without the table has no entries.
"""

from __future__ import annotations

from dataclasses import dataclass

from hangwatch.model.calls import Call

from .layout import CHECK_STRUCT, CheckFlag
from .parts import Table
from .reader import RingReader


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckEntry:
    """One entry of the check table. ``first`` is the first sequence number of the run of non-finite
    calls that it belongs to, ``rounds`` the length of that run in training rounds.
    """

    entered_ns: int
    seq: int
    chain: int
    checksum: int
    nan: int
    inf: int
    first: int
    stats: tuple[float, float, float, float]  # mean, min, max, norm
    uid: int
    signature: int
    site: int
    flags: CheckFlag
    rounds: int
    overflows: int


def read_check_entries(reader: RingReader, from_index: int = 0) -> tuple[list[CheckEntry], int]:
    """The complete entries from ``from_index`` on that are still in the table, oldest first, and
    the index at which the next read starts.
    """
    table = reader.checks
    entries: list[CheckEntry] = []
    while table.count:
        stamp = _read_stamp(reader, table, from_index)
        if stamp > from_index + 1:
            # The writer has overtaken the reader by a full round or more: its oldest entry is in
            # the next slot.
            from_index = max(from_index + 1, stamp - table.count)
        elif (entry := _read_entry(reader, table, from_index)) is not None:
            entries.append(entry)
            from_index += 1
        else:  # The entry is not written yet, or only in part.
            break
    return entries, from_index


def read_check_values(reader: RingReader) -> dict[tuple[int, int], dict[str, float]]:
    """Statistics of the sampled calls, by (stream uid, sequence number): mean, min, max and norm of
    the finite elements, and the number of non-finite ones.

    They describe the rank's input, or the result where the rank has no input, as in a broadcast
    from another rank. Reads the whole table, which takes one or two milliseconds.
    """
    values: dict[tuple[int, int], dict[str, float]] = {}
    for entry in read_check_entries(reader)[0]:
        if entry.flags & CheckFlag.VALUES:
            mean, low, high, norm = entry.stats
            values[entry.uid, entry.seq] = {
                "mean": mean,
                "min": low,
                "max": high,
                "norm": norm,
                "nonfinite": entry.nan + entry.inf,
            }
    return values


def call_from_entry(reader: RingReader, entry: CheckEntry, now_ns: int) -> Call:
    """The call of an entry; its own record may already be overwritten."""
    return reader.make_call(
        entry.seq,
        entry.signature,
        entry.site,
        chain=entry.chain,
        entered_s=max(0, now_ns - entry.entered_ns) / 1e9,
    )


def read_checked_calls(reader: RingReader, uid: int, now_ns: int, *, from_seq: int) -> list[Call]:
    """The calls of one stream that are still in the table, oldest first."""
    entries = {
        entry.seq: entry
        for entry in read_check_entries(reader)[0]
        if entry.uid == uid and entry.seq >= from_seq
    }
    return [call_from_entry(reader, entries[seq], now_ns) for seq in sorted(entries)]


def _read_stamp(reader: RingReader, table: Table, index: int) -> int:
    """Index + 1 of the entry in the slot of ``index``."""
    offset = table.offset + (index % table.count) * CHECK_STRUCT.size
    return int.from_bytes(reader.data[offset : offset + 8], "little")


def _read_entry(reader: RingReader, table: Table, index: int) -> CheckEntry | None:
    """One entry; None while it is being written and after it was overwritten."""
    if index < 0:
        return None
    offset = table.offset + (index % table.count) * CHECK_STRUCT.size
    values = CHECK_STRUCT.unpack_from(reader.data, offset)
    if (
        values[0] != index + 1
        or values[-1] != values[0] & 0xFFFFFFFF
        or _read_stamp(reader, table, index) != index + 1
    ):
        return None
    _, entered_ns, seq, chain, checksum, nan, inf, first = values[:8]
    uid, signature, site, flags, rounds, overflows = values[12:18]
    return CheckEntry(
        entered_ns=entered_ns,
        seq=seq,
        chain=chain,
        checksum=checksum,
        nan=nan,
        inf=inf,
        first=first,
        stats=values[8:12],
        uid=uid,
        signature=signature,
        site=site,
        flags=CheckFlag(flags),
        rounds=rounds,
        overflows=overflows,
    )
