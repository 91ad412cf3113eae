"""Reads the check table behind a ring's heap, which holds the results of `HANGWATCH_CHECKS`.

`hangwatch.ring.layout` documents the layout. One call may have two entries: one for the rank's
input and one for the result. A ring without the table has no entries.

MERGED: Selects the calls to sample. All ranks select the same ones without communicating.

There is one hash for all purposes. The native recorder computes it as well, so a change here needs
the same change in agent/recorder/native/ring_format.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hangwatch.model.calls import CHAIN_BASE, UINT64_MASK, Call

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
    table = reader.parts.checks
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
        else:  # not written yet, or only in part
            break
    return entries, from_index


def read_check_values(reader: RingReader) -> dict[tuple[int, int], dict[str, float]]:
    """Statistics of the sampled calls, by (stream uid, sequence number): mean, min, max and norm of
    the finite elements, and the number of non-finite ones.

    They describe the rank's input, or the result where the rank has no input, as in a broadcast
    from another rank. Reads the whole table, which takes one or two milliseconds.
    """
    return {
        (entry.uid, entry.seq): _entry_values(entry)
        for entry in read_check_entries(reader)[0]
        if entry.flags & CheckFlag.VALUES
    }


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


def _entry_values(entry: CheckEntry) -> dict[str, float]:
    mean, low, high, norm = entry.stats
    return {"mean": mean, "min": low, "max": high, "norm": norm, "nonfinite": entry.nan + entry.inf}


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
    ) = values
    return CheckEntry(
        entered_ns=entered_ns,
        seq=seq,
        chain=chain,
        checksum=checksum,
        nan=nan,
        inf=inf,
        first=first,
        stats=(stats[0], stats[1], stats[2], stats[3]),
        uid=uid,
        signature=signature,
        site=site,
        flags=CheckFlag(flags),
        rounds=rounds,
        overflows=overflows,
    )


# The recorder times the completion of calls of this level or above, where torch allows it.
MIN_TIMED_LEVEL = 6
# The checks always sample the first calls of a stream: they broadcast a job's initial state.
ALWAYS_CHECKED_CALLS = 8
ALWAYS_LEVEL = 64  # the level of these calls


def sampling_level(seq: int) -> int:
    """The level of call ``seq`` (from 1) of a stream: one call in 2**k has level k or above.

    The bits of multiples of the golden ratio are evenly distributed (Knuth, TAOCP volume 3, 6.4).
    If a training repeats its calls every 2**n calls, each of them is sampled sometimes; with
    multiples of a power of two it would always be the same one.
    """
    return 64 - (seq * CHAIN_BASE & UINT64_MASK).bit_length()


def check_level(seq: int) -> int:
    """The level of call ``seq`` for the checks, which examine the first calls of every stream."""
    return ALWAYS_LEVEL if seq <= ALWAYS_CHECKED_CALLS else sampling_level(seq)


def min_check_level(every: int, size_bytes: int, large_bytes: int) -> int:
    """The lowest level to check, so that one in ``every`` calls is checked; calls of more than
    ``large_bytes`` are checked proportionally less often.

    Both factors are rounded up to powers of two.
    """
    size_factor = max(1, -(-size_bytes // large_bytes))
    return (every - 1).bit_length() + (size_factor - 1).bit_length()


def sample_calls(seqs: Sequence[int], max_calls: int) -> list[int]:
    """At most ``max_calls`` of the calls: all those of the lowest level that allows it or above.
    The selections of different ranks overlap.
    """
    level = 0
    while len(seqs) > max_calls:
        level += 1
        seqs = [seq for seq in seqs if sampling_level(seq) >= level]
    return list(seqs)


def thin_checks(seqs: list[int], max_calls: int) -> set[int]:
    """At most ``max_calls`` of the checked calls, those of the highest levels, so that the
    selections of different ranks overlap.
    """
    by_level = sorted(seqs, key=check_level, reverse=True)
    if len(by_level) <= max_calls:
        return set(by_level)
    first_omitted = check_level(by_level[max_calls])
    kept = {seq for seq in by_level if check_level(seq) > first_omitted}
    return kept or set(by_level[:max_calls])
