"""Entries of a Flight Recorder as calls: those of one coalesced call together, each with what can be compared of it. Pure.

NCCL numbers collectives by process group, the same on every rank; sends and receives by group on each rank for itself. What is
coalesced has one number, and an entry behind its parts whose name ends with "coalesced" and whose state is that of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hangwatch.model.calls import Signature, Site
from hangwatch.model.plain_data import number, text
from hangwatch.model.threads import Frame
from hangwatch.stacks.frames import innermost_user

from .signatures import COALESCED, PEER, Shapes, Sizes, dtype, read_signature

NCCL = ("nccl", "ncclx", "rccl", "rcclx", "xccl", "hccl")  # and what was made of it: these record the end of whatever is coalesced
ARRIVALS = "gloo"  # its states always say "scheduled", and "retired" may be late: of its calls only who entered them is sure

_MOST_TENSORS, _MOST_DIMENSIONS, _MOST_FRAMES = 1 << 16, 64, 512

_Tensors = tuple[Shapes, Shapes, tuple[str, ...], tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One call; of a coalesced one, all its parts together. ``peer`` is None for a collective."""

    number: int  # of the record in the ring, from 0
    seq: int  # in its group
    signature: Signature
    sizes: Sizes
    peer: int | None = None  # the other end's rank in the group, -1 for a receive from any
    started: bool = False
    done: bool = False
    retired: bool = False
    cut: bool = False  # parts of it may have been overwritten
    unended: bool = False  # its parts were queued, and the call that sends them off was not made
    site: Site | None = None


@dataclass(slots=True)
class Known:
    """What many entries have in common, made once."""

    signatures: dict[object, tuple[Signature, Sizes]] = field(default_factory=dict)
    sites: dict[Site, Site] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry, looked at. ``told`` is the rest of it."""

    number: int
    uid: str | None
    group: str
    description: str
    backend: str
    name: str
    p2p: bool
    seq: int
    told: Mapping[str, Any]

    @classmethod
    def of(cls, told: Mapping[str, Any], at: int) -> Entry:
        """From the ``at``-th entry of a dump. Raises KeyError, TypeError, ValueError and the like where it is none."""
        group, description = told["process_group"]
        backend, _, name = text(told["profiling_name"]).rpartition(":")
        p2p = bool(told.get("is_p2p")) or name.startswith(("send ", "recv "))
        return cls(
            number(told.get("record_id", at)),
            str(number(told["pg_id"])) if "pg_id" in told else None,
            text(group),
            text(description),
            backend,
            name,
            p2p,
            number(told["p2p_seq_id" if p2p else "collective_seq_id"]),
            told,
        )

    @property
    def ends(self) -> bool:
        """It is the end of a coalesced call."""
        return bool(COALESCED.match(self.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """All calls of a dump, by group: see `hangwatch.flight_recorder.dumps.Dump`."""

    calls: dict[tuple[str, int], list[Record]]
    messages: dict[tuple[str, int], list[Record]]
    descriptions: dict[str, str]
    backends: dict[tuple[str, int], str]
    uids: dict[str, str]  # the recorder's number of a group, and its name
    miscounted: set[str]  # groups whose status counts something else than collectives
    wrapped: bool
    half_lost: bool
    timed: bool
    made_at: tuple[float, float]  # when its first and its last call were made, in seconds since the epoch; 0 where none is told


def records(entries: Sequence[Entry], known: Known) -> Made:
    """Raises what `Entry.of` raises."""
    entries = sorted(entries, key=lambda entry: entry.number)
    numbers = [entry.number for entry in entries]
    wrapped = not numbers or numbers[0] > 0 or numbers[-1] >= len(numbers)
    later: dict[str, list[str | None]] = {}  # by name, the numbers of the groups that had it one after another
    gathered: dict[tuple[str, int, bool, int], list[Entry]] = {}
    for entry in entries:
        had = later.setdefault(entry.group, [entry.uid])
        if entry.uid not in had:
            had.append(entry.uid)
        gathered.setdefault((entry.group, had.index(entry.uid), entry.p2p, entry.seq), []).append(entry)
    calls: dict[tuple[str, int], list[Record]] = {}
    messages: dict[tuple[str, int], list[Record]] = {}
    reader = _Reader(known)
    for (group, use, p2p, _), parts in gathered.items():
        cut = wrapped and parts[0] is entries[0]
        (messages if p2p else calls).setdefault((group, use), []).extend(reader.call(parts, cut))
    for made in calls.values():
        made.sort(key=lambda record: record.seq)
    # A recorder that was reset counts its records anew, but not the calls.
    wrapped |= any(made and min(record.seq for record in made) > 1 for made in (*calls.values(), *messages.values()))
    oldest = gathered[entries[0].group, 0, entries[0].p2p, entries[0].seq] if entries else []
    times = [number(entry.told.get("time_created_ns") or 0) for entry in entries]
    return Made(
        calls=calls,
        messages=messages,
        descriptions={entry.group: entry.description for entry in entries},
        backends={(group, use): parts[0].backend for (group, use, _, _), parts in gathered.items()},
        uids={had[-1]: name for name, had in later.items() if had[-1] is not None},
        miscounted={entry.group for entry in entries if entry.p2p or entry.backend == ARRIVALS},
        wrapped=wrapped,
        half_lost=wrapped and any(part.p2p and part.ends and part.told.get("state") != "completed" for part in oldest),
        timed=any(entry.told.get("state") == "started" or entry.told.get("time_discovered_started_ns") for entry in entries),
        made_at=(min(times, default=0) / 1e9, max(times, default=0) / 1e9),
    )


class _Reader:
    """Reads the entries of one dump: what they share, they share as one object."""

    def __init__(self, known: Known) -> None:
        self._known = known
        self._frames: dict[int, Frame] = {}
        self._sites: dict[tuple[int, ...], Site | None] = {}

    def call(self, parts: list[Entry], cut: bool) -> list[Record]:
        """One record, or of coalesced sends and receives one for each."""
        end = next((part for part in reversed(parts) if part.ends), None)
        unended = end is None and len(parts) > 1 and parts[0].backend in NCCL
        cut = cut and end is not None
        if parts[0].p2p:
            messages = [part for part in parts if part is not end and PEER.match(part.name)]
            return [self._record([part], (end or part).told, cut, unended) for part in messages]
        return [self._record(parts, (end or parts[-1]).told, cut, unended)]

    def _record(self, parts: list[Entry], state: Mapping[str, Any], cut: bool, unended: bool) -> Record:
        first, last = parts[0], parts[-1]
        compared = [part.told for part in parts if len(parts) == 1 or not part.ends]
        key = (*(part.name for part in parts), *map(_tensors, compared))
        if (made := self._known.signatures.get(key)) is None:
            made = self._known.signatures[key] = _read([part.name for part in parts], [_tensors(told) for told in compared])
        channel = PEER.match(first.name) if first.p2p else None
        return Record(
            number=last.number,
            seq=first.seq,
            signature=made[0],
            sizes=made[1],
            peer=None if channel is None else -1 if channel["other"] == "?" else int(channel["other"]),
            started=state.get("state") in ("started", "completed"),
            done=state.get("state") == "completed",
            retired=bool(state.get("retired")),
            cut=cut,
            unended=unended,
            site=self._site(last.told.get("frames") or first.told.get("frames") or ()),
        )

    def _site(self, frames: Sequence[Mapping[str, Any]]) -> Site | None:
        if not frames:
            return None
        frames = frames[:_MOST_FRAMES]
        by = tuple(map(id, frames))  # the dump holds each frame once, and stays alive as long as this
        if by not in self._sites:
            frame = innermost_user([self._frame(told) for told in frames])
            site = None if frame is None else Site(file=frame.file, line=frame.line, function=frame.function)
            self._sites[by] = site and self._known.sites.setdefault(site, site)
        return self._sites[by]

    def _frame(self, told: Mapping[str, Any]) -> Frame:
        if id(told) not in self._frames:
            self._frames[id(told)] = Frame(function=text(told["name"]), file=text(told["filename"]), line=number(told["line"]))
        return self._frames[id(told)]


def _tensors(told: Mapping[str, Any]) -> _Tensors:
    """The sizes and types of what goes in and comes out, as they are told."""
    ins, outs = told.get("input_sizes") or (), told.get("output_sizes") or ()
    kinds = [told.get(key) or () for key in ("input_dtypes", "output_dtypes")]
    if max(len(ins), len(outs), *map(len, kinds)) > _MOST_TENSORS or max(map(len, (*ins, *outs)), default=0) > _MOST_DIMENSIONS:
        raise ValueError("more tensors, or more dimensions, than a call has")
    taken, given = ((kind,) if isinstance(kind, str) else tuple(kind) for kind in kinds)
    return tuple(map(tuple, ins)), tuple(map(tuple, outs)), taken, given


def _read(names: Sequence[str], tensors: Sequence[_Tensors]) -> tuple[Signature, Sizes]:
    inputs, outputs = (tuple(tuple(map(number, shape)) for told in tensors for shape in told[side]) for side in (0, 1))
    dtypes = [shown for told in tensors for kinds in told[2:] for name in kinds if (shown := dtype(text(name))) is not None]
    return read_signature(names, inputs, outputs, dtypes)
