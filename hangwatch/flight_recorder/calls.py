"""Entries of a Flight Recorder as calls: those of one coalesced call together, each with what can
be compared of it. Pure.

NCCL numbers collectives by process group, the same on every rank; sends and receives by group on
each rank for itself. What is coalesced has one number, and an entry behind its parts whose name
ends with "coalesced" and whose state is that of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hangwatch.model.backends import COALESCED_END_BACKENDS
from hangwatch.model.calls import Signature, Site
from hangwatch.model.plain_data import parse_int, parse_text
from hangwatch.model.threads import Frame
from hangwatch.stacks.frames import find_innermost_user_frame

from .signatures import (
    COALESCED_PATTERN,
    PEER_PATTERN,
    Shapes,
    TensorSizes,
    parse_dtype,
    read_signature,
)

# its states always say "scheduled", and "retired" may be late: of its calls only who entered them
# is sure
ARRIVALS_ONLY_BACKEND = "gloo"

_MAX_TENSORS, _MAX_DIMENSIONS, _MAX_FRAMES = 1 << 16, 64, 512

_TensorFields = tuple[Shapes, Shapes, tuple[str, ...], tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightRecord:
    """One call; of a coalesced one, all its parts together. ``peer`` is None for a collective."""

    record_id: int  # of the record in the ring, from 0
    seq: int  # in its group
    signature: Signature
    sizes: TensorSizes
    peer: int | None = None  # the other end's rank in the group, -1 for a receive from any
    started: bool = False
    completed: bool = False
    retired: bool = False
    may_be_truncated: bool = False  # parts of it may have been overwritten
    never_submitted: bool = (
        False  # its parts were queued, and the call that sends them off was not made
    )
    site: Site | None = None


@dataclass(slots=True)
class InternPool:
    """What many entries have in common, made once."""

    signatures: dict[object, tuple[Signature, TensorSizes]] = field(default_factory=dict)
    sites: dict[Site, Site] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FlightEntry:
    """One entry, looked at. ``told`` is the rest of it."""

    record_id: int
    pg_id: str | None
    group: str
    description: str
    backend: str
    name: str
    is_p2p: bool
    seq: int
    fields: Mapping[str, Any]

    @classmethod
    def parse_entry(cls, fields: Mapping[str, Any], index: int) -> FlightEntry:
        """From the ``at``-th entry of a dump. Raises KeyError, TypeError, ValueError and the like
        where it is none.
        """
        group, description = fields["process_group"]
        backend, _, name = parse_text(fields["profiling_name"]).rpartition(":")
        p2p = bool(fields.get("is_p2p")) or name.startswith(("send ", "recv "))
        return cls(
            parse_int(fields.get("record_id", index)),
            str(parse_int(fields["pg_id"])) if "pg_id" in fields else None,
            parse_text(group),
            parse_text(description),
            backend,
            name,
            p2p,
            parse_int(fields["p2p_seq_id" if p2p else "collective_seq_id"]),
            fields,
        )

    @property
    def is_coalesced_end(self) -> bool:
        """It is the end of a coalesced call."""
        return bool(COALESCED_PATTERN.match(self.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCalls:
    """All calls of a dump, by group: see `hangwatch.flight_recorder.dumps.Dump`."""

    calls: dict[tuple[str, int], list[FlightRecord]]
    p2p_calls: dict[tuple[str, int], list[FlightRecord]]
    descriptions: dict[str, str]
    backends: dict[tuple[str, int], str]
    names_by_pg_id: dict[str, str]  # the recorder's number of a group, and its name
    unreliable_counts: set[str]  # groups whose status counts something else than collectives
    wrapped: bool
    pending_messages_lost: bool
    reports_starts: bool
    call_time_range: tuple[
        float,
        float,
        # when its first and its last call were made, in seconds since the epoch; 0 where none is
        # told
    ]


def collect_calls(entries: Sequence[FlightEntry], pool: InternPool) -> ParsedCalls:
    """Raises what `Entry.of` raises."""
    entries = sorted(entries, key=lambda entry: entry.record_id)
    numbers = [entry.record_id for entry in entries]
    wrapped = not numbers or numbers[0] > 0 or numbers[-1] >= len(numbers)
    later: dict[
        str, list[str | None]
    ] = {}  # by name, the numbers of the groups that had it one after another
    gathered: dict[tuple[str, int, bool, int], list[FlightEntry]] = {}
    for entry in entries:
        had = later.setdefault(entry.group, [entry.pg_id])
        if entry.pg_id not in had:
            had.append(entry.pg_id)
        gathered.setdefault(
            (entry.group, had.index(entry.pg_id), entry.is_p2p, entry.seq), []
        ).append(entry)
    calls: dict[tuple[str, int], list[FlightRecord]] = {}
    messages: dict[tuple[str, int], list[FlightRecord]] = {}
    reader = _EntryReader(pool)
    for (group, use, p2p, _), parts in gathered.items():
        cut = wrapped and parts[0] is entries[0]
        (messages if p2p else calls).setdefault((group, use), []).extend(
            reader.read_call(parts, cut)
        )
    for made in calls.values():
        made.sort(key=lambda record: record.seq)
    # A recorder that was reset counts its records anew, but not the calls.
    wrapped |= any(
        made and min(record.seq for record in made) > 1
        for made in (*calls.values(), *messages.values())
    )
    oldest = gathered[entries[0].group, 0, entries[0].is_p2p, entries[0].seq] if entries else []
    times = [parse_int(entry.fields.get("time_created_ns") or 0) for entry in entries]
    return ParsedCalls(
        calls=calls,
        p2p_calls=messages,
        descriptions={entry.group: entry.description for entry in entries},
        backends={(group, use): parts[0].backend for (group, use, _, _), parts in gathered.items()},
        names_by_pg_id={had[-1]: name for name, had in later.items() if had[-1] is not None},
        unreliable_counts={
            entry.group
            for entry in entries
            if entry.is_p2p or entry.backend == ARRIVALS_ONLY_BACKEND
        },
        wrapped=wrapped,
        pending_messages_lost=wrapped
        and any(
            part.is_p2p and part.is_coalesced_end and part.fields.get("state") != "completed"
            for part in oldest
        ),
        reports_starts=any(
            entry.fields.get("state") == "started" or entry.fields.get("time_discovered_started_ns")
            for entry in entries
        ),
        call_time_range=(min(times, default=0) / 1e9, max(times, default=0) / 1e9),
    )


class _EntryReader:
    """Reads the entries of one dump: what they share, they share as one object."""

    def __init__(self, pool: InternPool) -> None:
        self._pool = pool
        self._frames: dict[int, Frame] = {}
        self._sites: dict[tuple[int, ...], Site | None] = {}

    def read_call(self, parts: list[FlightEntry], may_be_truncated: bool) -> list[FlightRecord]:
        """One record, or of coalesced sends and receives one for each."""
        end = next((part for part in reversed(parts) if part.is_coalesced_end), None)
        unended = end is None and len(parts) > 1 and parts[0].backend in COALESCED_END_BACKENDS
        may_be_truncated = may_be_truncated and end is not None
        if parts[0].is_p2p:
            messages = [part for part in parts if part is not end and PEER_PATTERN.match(part.name)]
            return [
                self._build_record([part], (end or part).fields, may_be_truncated, unended)
                for part in messages
            ]
        return [self._build_record(parts, (end or parts[-1]).fields, may_be_truncated, unended)]

    def _build_record(
        self,
        parts: list[FlightEntry],
        state_fields: Mapping[str, Any],
        may_be_truncated: bool,
        never_submitted: bool,
    ) -> FlightRecord:
        first, last = parts[0], parts[-1]
        compared = [part.fields for part in parts if len(parts) == 1 or not part.is_coalesced_end]
        key = (*(part.name for part in parts), *map(_read_tensors, compared))
        if (made := self._pool.signatures.get(key)) is None:
            made = self._pool.signatures[key] = _build_signature(
                [part.name for part in parts], [_read_tensors(told) for told in compared]
            )
        channel = PEER_PATTERN.match(first.name) if first.is_p2p else None
        return FlightRecord(
            record_id=last.record_id,
            seq=first.seq,
            signature=made[0],
            sizes=made[1],
            peer=(
                None
                if channel is None
                else -1
                if channel["other"] == "?"
                else int(channel["other"])
            ),
            started=state_fields.get("state") in ("started", "completed"),
            completed=state_fields.get("state") == "completed",
            retired=bool(state_fields.get("retired")),
            may_be_truncated=may_be_truncated,
            never_submitted=never_submitted,
            site=self._find_site(last.fields.get("frames") or first.fields.get("frames") or ()),
        )

    def _find_site(self, frames: Sequence[Mapping[str, Any]]) -> Site | None:
        if not frames:
            return None
        frames = frames[:_MAX_FRAMES]
        by = tuple(
            map(id, frames)
        )  # the dump holds each frame once, and stays alive as long as this
        if by not in self._sites:
            frame = find_innermost_user_frame([self._build_frame(told) for told in frames])
            site = (
                None
                if frame is None
                else Site(file=frame.file, line=frame.line, function=frame.function)
            )
            self._sites[by] = site and self._pool.sites.setdefault(site, site)
        return self._sites[by]

    def _build_frame(self, fields: Mapping[str, Any]) -> Frame:
        if id(fields) not in self._frames:
            self._frames[id(fields)] = Frame(
                function=parse_text(fields["name"]),
                file=parse_text(fields["filename"]),
                line=parse_int(fields["line"]),
            )
        return self._frames[id(fields)]


def _read_tensors(fields: Mapping[str, Any]) -> _TensorFields:
    """The sizes and types of what goes in and comes out, as they are told."""
    ins, outs = fields.get("input_sizes") or (), fields.get("output_sizes") or ()
    kinds = [fields.get(key) or () for key in ("input_dtypes", "output_dtypes")]
    if (
        max(len(ins), len(outs), *map(len, kinds)) > _MAX_TENSORS
        or max(map(len, (*ins, *outs)), default=0) > _MAX_DIMENSIONS
    ):
        raise ValueError("more tensors, or more dimensions, than a call has")
    taken, given = ((kind,) if isinstance(kind, str) else tuple(kind) for kind in kinds)
    return tuple(map(tuple, ins)), tuple(map(tuple, outs)), taken, given


def _build_signature(
    names: Sequence[str], tensors: Sequence[_TensorFields]
) -> tuple[Signature, TensorSizes]:
    inputs, outputs = (
        tuple(tuple(map(parse_int, shape)) for told in tensors for shape in told[side])
        for side in (0, 1)
    )
    dtypes = [
        shown
        for told in tensors
        for kinds in told[2:]
        for name in kinds
        if (shown := parse_dtype(parse_text(name))) is not None
    ]
    return read_signature(names, inputs, outputs, dtypes)
