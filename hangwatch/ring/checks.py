"""Reads the check table behind a ring's heap, which holds the results of `HANGWATCH_CHECKS`.

`hangwatch.ring.layout` documents the layout. One call may have two entries: one for the rank's
input and one for the result. A ring without the table has no entries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hangwatch.model.calls import Call

from .layout import CheckFlag

if TYPE_CHECKING:
    from .reader import RingReader  # the recorder, which writes entries, does not load it


class CheckEntry(NamedTuple):
    """One entry, with its fields in their order there. ``first`` is the first call of its run of
    non-finite calls, ``rounds`` the length of the run in training rounds.
    """

    entered_ns: int
    seq: int
    chain: int
    checksum: int
    nan: int
    inf: int
    first: int
    mean: float  # this and the next three are those of the finite elements
    lowest: float
    highest: float
    norm: float
    uid: int
    signature: int
    site: int
    flags: int  # of `CheckFlag`
    rounds: int
    overflows: int

    @property
    def stats(self) -> tuple[float, float, float, float]:
        """Mean, minimum, maximum and norm of the finite elements."""
        return self.mean, self.lowest, self.highest, self.norm


def read_check_entries(reader: RingReader, from_index: int = 0) -> tuple[list[CheckEntry], int]:
    """The complete entries from ``from_index`` on that are still in the table, oldest first, and
    the index at which the next read starts.
    """
    table = reader.checks
    entries = []
    while table.count:
        stamp = reader.read_stamp(table, from_index)
        if stamp > from_index + 1:
            # The writer is a full round or more ahead: its oldest entry is in the next slot.
            from_index = max(from_index + 1, stamp - table.count)
            continue
        values = reader.read_stamped(table, from_index)
        if values is None:  # The entry is not written yet, or only in part.
            break
        entries.append(CheckEntry(*values[1:18]))
        from_index += 1
    return entries, from_index


def read_value_entries(reader: RingReader) -> dict[tuple[int, int], CheckEntry]:
    """The entries with statistics, by (stream uid, sequence number): those of the rank's input, or of
    the result where the rank has no input, as in a broadcast from another rank. Reads the whole
    table, which takes one or two milliseconds.
    """
    return {
        (entry.uid, entry.seq): entry
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
