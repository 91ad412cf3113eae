"""Reads the table of checks behind a ring's heap: what `HANGWATCH_CHECKS` found.
`hangwatch.ring.layout` documents the layout.

For one call there may be two entries: of what the rank put in, and of the result. A reader of a
ring without the table finds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from hangwatch.model.calls import Call

from .layout import CHECK_STRUCT, CheckFlag
from .reader import RingReader


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckEntry:
    """One entry of the table. ``first`` and ``rounds`` tell of the run of calls of the same kind
    that were not finite.
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
    """The whole entries from the ``after``-th on that are still there, oldest first, and where the
    next look begins.
    """
    at, count = reader.locate_check_table(CHECK_STRUCT.size)
    found: list[CheckEntry] = []
    while count:
        stamp = _read_stamp(reader, at, count, from_index)
        if (
            stamp > from_index + 1
            # the writer was quicker by a round or more: its oldest entry is in the slot behind this
            # one
        ):
            from_index = max(from_index + 1, stamp - count)
        elif (entry := _read_entry(reader, at, count, from_index)) is not None:
            found.append(entry)
            from_index += 1
        else:  # not there yet, or only half
            break
    return found, from_index


def read_check_values(reader: RingReader) -> dict[tuple[int, int], dict[str, float]]:
    """Of the calls that were sampled, by sequence uid and seq: mean, min, max and norm of the
    finite elements and the number of others, of what the rank put in. Where it puts nothing in, as
    into another's broadcast, of the result.

    Reads the whole table, which takes a millisecond or two.
    """
    return {
        (entry.uid, entry.seq): _entry_values(entry)
        for entry in read_check_entries(reader)[0]
        if entry.flags & CheckFlag.VALUES
    }


def call_from_entry(reader: RingReader, entry: CheckEntry, now_ns: int) -> Call:
    """The call that it is about, also where its record is overwritten."""
    return reader.make_call(
        entry.seq,
        entry.signature,
        entry.site,
        chain=entry.chain,
        entered_s=max(0, now_ns - entry.entered_ns) / 1e9,
    )


def read_checked_calls(reader: RingReader, uid: int, now_ns: int, *, from_seq: int) -> list[Call]:
    """The calls of one sequence that the table still tells of, oldest first."""
    found = {
        entry.seq: entry
        for entry in read_check_entries(reader)[0]
        if entry.uid == uid and entry.seq >= from_seq
    }
    return [call_from_entry(reader, found[seq], now_ns) for seq in sorted(found)]


def _entry_values(entry: CheckEntry) -> dict[str, float]:
    mean, low, high, norm = entry.stats
    return {"mean": mean, "min": low, "max": high, "norm": norm, "nonfinite": entry.nan + entry.inf}


def _read_stamp(reader: RingReader, at: int, count: int, index: int) -> int:
    """Index + 1 of the entry in the slot of ``index``."""
    where = at + (index % count) * CHECK_STRUCT.size
    return int.from_bytes(reader.data[where : where + 8], "little")


def _read_entry(reader: RingReader, at: int, count: int, index: int) -> CheckEntry | None:
    """None where it is being written, or is gone."""
    if index < 0:
        return None
    told = CHECK_STRUCT.unpack_from(reader.data, at + (index % count) * CHECK_STRUCT.size)
    if (
        told[0] != index + 1
        or told[-1] != told[0] & 0xFFFFFFFF
        or _read_stamp(reader, at, count, index) != index + 1
    ):
        return None
    (
        _,
        entered_ns,
        seq,
        chain,
        checksum,
        nan,
        inf,
        first,
        *stats,
        uid,
        signature,
        site,
        flags,
        rounds,
        overflows,
        _,
        _,
    ) = told
    return CheckEntry(
        entered_ns=entered_ns, seq=seq, chain=chain, checksum=checksum, nan=nan, inf=inf, first=first,
        stats=(stats[0], stats[1], stats[2], stats[3]),
        uid=uid, signature=signature, site=site, flags=CheckFlag(flags), rounds=rounds, overflows=overflows,
    )  # fmt: skip
