"""PyTorch Flight Recorder dumps, from plain data to calls with the arguments that can be compared
between ranks. Pure.

The layout is that of ``torch/csrc/distributed/c10d/FlightRecorder.hpp``: ``version``,
``pg_config``, ``pg_status`` and ``entries``, oldest first. Every version and backend writes them a
little differently, so the parser is lenient. Arguments that the recorder does not record (reduce
ops, roots, tags, split sizes) cannot be compared. The data may be malicious: every type is checked,
and no object of it is converted to text before.

NCCL numbers collectives by process group, equally on every rank, and sends and receives by group,
separately on each rank. The parts of a coalesced call have the same number. An entry after them,
whose name ends with "coalesced", has the state of the whole call.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hangwatch.model.calls import Signature, Site
from hangwatch.model.groups import COALESCED_END_BACKENDS, DeviceCounters
from hangwatch.model.incidents import UnfinishedCall
from hangwatch.model.ranks import Frame
from hangwatch.stacks.frames import find_innermost_user_frame

from .entries import (
    PEER_PATTERN,
    FlightEntry,
    RawFields,
    TensorSizes,
    parse_groups,
    parse_int,
    parse_statuses,
    parse_text,
    read_signature,
    read_tensors,
)

# The states in gloo's dumps are always "scheduled", and "retired" may be late: only which rank
# entered which call is certain.
ARRIVALS_ONLY_BACKEND = "gloo"
# The major version of the layout, which is not torch's: torch 2.5 writes 2.4, torch 2.13 2.10.
SUPPORTED_MAJOR = "2"
MAX_ENTRIES = 1 << 17  # the recorder keeps 2,000 unless it is told otherwise
MAX_STREAMS = 1 << 14  # groups, and channels of point-to-point calls
_MAX_FRAMES = 512
# The errors of code that reads malformed data.
PARSE_ERRORS = (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError)
# Limits of `find_unfinished_calls`.
_MAX_GROUPS = 16
_MAX_SHOWN_TENSORS, _MAX_SHOWN_DIMENSIONS = 8, 16
_MAX_TEXT = 200

# A process group's name, and an index from 0 among the groups that had this name in the process one
# after another.
GroupInstance = tuple[str, int]
_SitesByFrames = dict[tuple[int, ...], Site | None]  # the keys are the ids of the frames of a dump


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightRecord:
    """One call; the parts of a coalesced call are one record."""

    record_id: int  # the record's number in the ring, from 0
    seq: int  # the call's number in its group
    signature: Signature
    sizes: TensorSizes
    # The rank in the group at the other end, -1 for a receive from any; None for a collective.
    peer: int | None = None
    started: bool = False
    completed: bool = False
    retired: bool = False
    may_be_truncated: bool = False  # some of its parts may have been overwritten
    never_submitted: bool = False  # the parts were queued, but the call that submits them is absent
    site: Site | None = None


_share_site = functools.lru_cache(maxsize=4096)(Site)


def _read_call(
    parts: list[FlightEntry], may_be_truncated: bool, sites: _SitesByFrames
) -> list[FlightRecord]:
    """The record of the call with these entries; one for each message if they are coalesced."""
    end = next((part for part in reversed(parts) if part.is_coalesced_end), None)
    is_batch = len(parts) > 1 and parts[0].backend in COALESCED_END_BACKENDS
    parts_by_record = [parts]
    if parts[0].is_p2p:
        parts_by_record = [[part] for part in parts if PEER_PATTERN.match(part.name)]
    records = []
    for record_parts in parts_by_record:
        first, last = record_parts[0], record_parts[-1]
        with_tensors = record_parts
        if len(record_parts) > 1:
            with_tensors = [part for part in record_parts if not part.is_coalesced_end]
        signature, sizes = read_signature(
            tuple(part.name for part in record_parts),
            tuple(read_tensors(part.fields) for part in with_tensors),
        )
        peer = None
        channel = PEER_PATTERN.match(first.name) if first.is_p2p else None
        if channel:
            peer = -1 if channel["other"] == "?" else int(channel["other"])
        fields = (end or last).fields
        state = fields.get("state")
        frames = last.fields.get("frames") or first.fields.get("frames") or ()
        records.append(
            FlightRecord(
                record_id=last.record_id,
                seq=first.seq,
                signature=signature,
                sizes=sizes,
                peer=peer,
                started=state in ("started", "completed"),
                completed=state == "completed",
                retired=bool(fields.get("retired")),
                may_be_truncated=may_be_truncated and end is not None,
                never_submitted=is_batch and end is None,
                site=_find_site(frames[:_MAX_FRAMES], sites) if frames else None,
            )
        )
    return records


def _find_site(frames: Sequence[RawFields], sites: _SitesByFrames) -> Site | None:
    key = tuple(map(id, frames))  # a dump has each frame as one object
    if key not in sites:
        stack = []
        for fields in frames:
            frame = Frame(
                function=parse_text(fields["name"]),
                file=parse_text(fields["filename"]),
                line=parse_int(fields["line"]),
            )
            stack.append(frame)
        innermost = find_innermost_user_frame(stack)
        sites[key] = None
        if innermost is not None:
            sites[key] = _share_site(
                file=innermost.file, line=innermost.line, function=innermost.function
            )
    return sites[key]


class FlightDumpError(ValueError):
    """The data is not a Flight Recorder dump."""


@dataclass(slots=True, kw_only=True)
class GroupCalls:
    """One process group in one rank's dump: the calls that the ring held."""

    desc: str
    index: int  # as in `GroupInstance`
    backend: str = ""
    collectives: dict[int, FlightRecord] = field(default_factory=dict)  # ordered by number
    messages: list[FlightRecord] = field(default_factory=list)  # sends and receives as recorded
    has_messages: bool = False  # also if the ring has lost all of them

    @property
    def records(self) -> list[FlightRecord]:
        return [*self.collectives.values(), *self.messages]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightDump:
    """One rank's recorder: its process groups, and the calls that its ring held."""

    rank: int
    groups: Mapping[GroupInstance, GroupCalls]  # the groups that made calls
    members: Mapping[str, tuple[int, ...]]  # the recorded members of each group, by its name
    # By the name of the group, if the recorder counts collectives only.
    statuses: Mapping[str, DeviceCounters]
    wrapped: bool  # older records were overwritten, or left out
    pending_messages_lost: bool  # some pending sends or receives were overwritten
    # The times of the first and the last call, in seconds since the epoch; 0 if unknown.
    call_time_range: tuple[float, float]
    # The recorder records when the device starts a call, so that "scheduled" means not started.
    reports_starts: bool


def parse_dump(rank: int, data: object) -> FlightDump:
    """A rank's dump from plain data. Raises FlightDumpError, with the reason, for other data."""
    if (
        not isinstance(data, Mapping)
        or "version" not in data
        or not isinstance(data.get("pg_config", {}), Mapping)
    ):
        raise FlightDumpError("it has no 'version' and 'pg_config', as Flight Recorder dumps have")
    try:
        return _parse_fields(rank, data)
    except FlightDumpError:
        raise
    except PARSE_ERRORS as error:
        reason = f"{type(error).__name__}: {error}"[:200]
        raise FlightDumpError(
            f"its entries are not those of a Flight Recorder dump: {reason}"
        ) from error


def _parse_fields(rank: int, data: Mapping[str, object]) -> FlightDump:
    version = parse_text(data["version"])
    if version.split(".")[0] != SUPPORTED_MAJOR:
        raise FlightDumpError(
            f"its layout is version {version}; this reads {SUPPORTED_MAJOR}.x, which torch 2.5 and"
            " later write"
        )
    raw_entries = data.get("entries") or []
    status = data.get("pg_status") or {}
    if not isinstance(raw_entries, (list, tuple)) or len(raw_entries) > MAX_ENTRIES:
        raise TypeError("the entries are not a list, or the list is too long")
    entries = [FlightEntry.parse_entry(fields, index) for index, fields in enumerate(raw_entries)]
    entries.sort(key=lambda entry: entry.record_id)
    # A record is missing where the numbers do not run from 0 to the last one.
    wrapped = True
    if entries:
        wrapped = entries[0].record_id > 0 or entries[-1].record_id >= len(entries)
    descriptions = {entry.group: entry.description for entry in entries}
    groups: dict[GroupInstance, GroupCalls] = {}
    # The recorder's numbers of the groups that had a name one after another, by name.
    pg_ids_by_name: dict[str, dict[str | None, int]] = {}
    parts_by_call = defaultdict(list)
    unreliable_names = set()  # groups whose status counts other calls too
    for entry in entries:
        name = entry.group
        pg_ids = pg_ids_by_name.setdefault(name, {})
        index = pg_ids.setdefault(entry.pg_id, len(pg_ids))
        instance = (name, index)
        if instance not in groups:
            groups[instance] = GroupCalls(desc=descriptions[name], index=index)
        parts_by_call[instance, entry.is_p2p, entry.seq].append(entry)
        if entry.is_p2p or entry.backend == ARRIVALS_ONLY_BACKEND:
            unreliable_names.add(name)
    channels = {(entry.group, entry.name) for entry in entries if entry.is_p2p}
    if len(groups) + len(channels) > MAX_STREAMS:
        raise ValueError("more groups and channels than a process has")
    oldest_parts = next(iter(parts_by_call.values()), [])
    sites: _SitesByFrames = {}
    for (instance, is_p2p, seq), parts in parts_by_call.items():
        group = groups[instance]
        group.backend = parts[0].backend
        records = _read_call(parts, wrapped and parts is oldest_parts, sites)
        if is_p2p:
            group.has_messages = True
            group.messages += records
        else:
            group.collectives[seq] = records[0]
    for group in groups.values():
        group.collectives = dict(sorted(group.collectives.items()))
        # A recorder that was reset numbers its records from 0 again, but not the calls.
        for seqs in (group.collectives, [record.seq for record in group.messages]):
            wrapped |= min(seqs, default=1) > 1
    default_names = [name for name, desc in descriptions.items() if desc == "default_pg"]
    members = parse_groups(data.get("pg_config") or {}, default_names)
    names_by_pg_id = {}
    for name, pg_ids in pg_ids_by_name.items():
        newest_pg_id = next(reversed(pg_ids))
        if newest_pg_id is not None:
            names_by_pg_id[newest_pg_id] = name
    times_ns = [entry.created_ns for entry in entries]
    return FlightDump(
        rank=rank,
        groups=groups,
        members=members,
        statuses=parse_statuses(status, members, names_by_pg_id, unreliable_names),
        wrapped=wrapped and bool(entries or status),
        pending_messages_lost=wrapped
        and any(
            part.is_p2p and part.is_coalesced_end and part.fields.get("state") != "completed"
            for part in oldest_parts
        ),
        reports_starts=any(
            entry.fields.get("state") == "started" or entry.fields.get("time_discovered_started_ns")
            for entry in entries
        ),
        call_time_range=(min(times_ns, default=0) / 1e9, max(times_ns, default=0) / 1e9),
    )


def find_unfinished_calls(data: object, written_ns: int) -> tuple[UnfinishedCall, ...]:
    """The first unfinished collective of each group, the one that waited longest first. The dump is
    not analyzed as a whole.

    ``written_ns`` is when the dump was written, in nanoseconds since the epoch. Raises ValueError,
    TypeError, KeyError, AttributeError or OverflowError if the data is not a dump.
    """
    entries = data.get("entries") if isinstance(data, Mapping) else None
    if not isinstance(entries, (list, tuple)) or len(entries) > MAX_ENTRIES:
        raise ValueError("it has no list of entries, as Flight Recorder dumps have")
    first_by_group: dict[str, UnfinishedCall] = {}
    for index, fields in enumerate(entries):
        if fields.get("state") == "completed" or fields.get("retired"):
            continue
        entry = FlightEntry.parse_entry(fields, index)
        if entry.is_p2p or entry.group in first_by_group:
            continue
        timeout_ms = parse_int(fields.get("timeout_ms") or 0)
        waited_ns = max(0, written_ns - entry.created_ns) if entry.created_ns else 0
        shapes = read_tensors(fields).inputs[:_MAX_SHOWN_TENSORS]
        first_by_group[entry.group] = UnfinishedCall(
            group=entry.group[:_MAX_TEXT],
            desc=entry.description[:_MAX_TEXT],
            seq=entry.seq,
            op=entry.name[:_MAX_TEXT],
            shapes=tuple(tuple(map(parse_int, shape[:_MAX_SHOWN_DIMENSIONS])) for shape in shapes),
            state=parse_text(fields.get("state") or "")[:_MAX_TEXT],
            waited_s=round(waited_ns / 1e9, 1),
            timeout_s=timeout_ms / 1e3 if timeout_ms > 0 else None,
        )
    calls = sorted(first_by_group.values(), key=lambda call: -call.waited_s)
    return tuple(calls[:_MAX_GROUPS])
