"""Calls, from the entries of a Flight Recorder: the entries of a coalesced call together, each call
with the arguments that can be compared between ranks. Pure.

NCCL numbers collectives by process group, equally on every rank, and sends and receives by group,
separately on each rank. The parts of a coalesced call have the same number. An entry after them,
whose name ends with "coalesced", has the state of the whole call.
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

from .entries import FlightEntry, TensorFields, read_tensors
from .signatures import PEER_PATTERN, Shapes, TensorSizes, parse_dtype, read_signature

# Its states always say "scheduled", and "retired" may be late: only which rank entered which call
# is certain.
ARRIVALS_ONLY_BACKEND = "gloo"

_MAX_FRAMES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightRecord:
    """One call; of a coalesced one, all its parts together."""

    record_id: int  # of the record in the ring, from 0
    seq: int  # in its group
    signature: Signature
    sizes: TensorSizes
    # The rank in the group at the other end, -1 for a receive from any; None for a collective.
    peer: int | None = None
    started: bool = False
    completed: bool = False
    retired: bool = False
    may_be_truncated: bool = False  # parts of it may have been overwritten
    never_submitted: bool = False  # its parts were queued, but the call that submits them is absent
    site: Site | None = None


@dataclass(slots=True)
class InternPool:
    """Objects that many entries have in common, so that each exists once."""

    signatures: dict[object, tuple[Signature, TensorSizes]] = field(default_factory=dict)
    sites: dict[Site, Site] = field(default_factory=dict)


class CallReader:
    """Makes records of one dump's entries. Equal signatures and sites are shared objects."""

    def __init__(self, pool: InternPool) -> None:
        self._pool = pool
        self._frames: dict[int, Frame] = {}
        self._sites: dict[tuple[int, ...], Site | None] = {}

    def read_call(self, parts: list[FlightEntry], may_be_truncated: bool) -> list[FlightRecord]:
        """The record of the call with these entries; one for each message if the entries are
        coalesced sends and receives.
        """
        end = next((part for part in reversed(parts) if part.is_coalesced_end), None)
        may_be_truncated = may_be_truncated and end is not None
        never_submitted = (
            end is None and len(parts) > 1 and parts[0].backend in COALESCED_END_BACKENDS
        )
        if not parts[0].is_p2p:
            state_fields = (end or parts[-1]).fields
            return [self._build_record(parts, state_fields, may_be_truncated, never_submitted)]
        records: list[FlightRecord] = []
        for part in parts:
            if part is not end and PEER_PATTERN.match(part.name):
                state_fields = (end or part).fields
                records.append(
                    self._build_record([part], state_fields, may_be_truncated, never_submitted)
                )
        return records

    def _build_record(
        self,
        parts: list[FlightEntry],
        state_fields: Mapping[str, Any],
        may_be_truncated: bool,
        never_submitted: bool,
    ) -> FlightRecord:
        first, last = parts[0], parts[-1]
        signature, sizes = self._read_signature(parts)
        state = state_fields.get("state")
        frames = last.fields.get("frames") or first.fields.get("frames") or ()
        return FlightRecord(
            record_id=last.record_id,
            seq=first.seq,
            signature=signature,
            sizes=sizes,
            peer=_parse_peer(first),
            started=state in ("started", "completed"),
            completed=state == "completed",
            retired=bool(state_fields.get("retired")),
            may_be_truncated=may_be_truncated,
            never_submitted=never_submitted,
            site=self._find_site(frames) if frames else None,
        )

    def _read_signature(self, parts: list[FlightEntry]) -> tuple[Signature, TensorSizes]:
        names = tuple(part.name for part in parts)
        tensors = tuple(
            read_tensors(part.fields)
            for part in parts
            if len(parts) == 1 or not part.is_coalesced_end
        )
        key = (names, tensors)
        interned = self._pool.signatures.get(key)
        if interned is None:
            interned = self._pool.signatures[key] = _build_signature(names, tensors)
        return interned

    def _find_site(self, frames: Sequence[Mapping[str, Any]]) -> Site | None:
        frames = frames[:_MAX_FRAMES]
        # A dump has each frame as one object, which exists at least as long as this reader.
        key = tuple(map(id, frames))
        if key not in self._sites:
            site = None
            frame = find_innermost_user_frame([self._build_frame(fields) for fields in frames])
            if frame is not None:
                site = Site(file=frame.file, line=frame.line, function=frame.function)
                site = self._pool.sites.setdefault(site, site)
            self._sites[key] = site
        return self._sites[key]

    def _build_frame(self, fields: Mapping[str, Any]) -> Frame:
        if id(fields) not in self._frames:
            self._frames[id(fields)] = Frame(
                function=parse_text(fields["name"]),
                file=parse_text(fields["filename"]),
                line=parse_int(fields["line"]),
            )
        return self._frames[id(fields)]


def _parse_peer(entry: FlightEntry) -> int | None:
    channel = PEER_PATTERN.match(entry.name) if entry.is_p2p else None
    if channel is None:
        return None
    return -1 if channel["other"] == "?" else int(channel["other"])


def _build_signature(
    names: Sequence[str], tensors: Sequence[TensorFields]
) -> tuple[Signature, TensorSizes]:
    input_shapes: list[tuple[int, ...]] = []
    output_shapes: list[tuple[int, ...]] = []
    dtypes: list[str] = []
    for inputs, outputs, input_dtypes, output_dtypes in tensors:
        input_shapes.extend(_parse_shapes(inputs))
        output_shapes.extend(_parse_shapes(outputs))
        for name in (*input_dtypes, *output_dtypes):
            dtype = parse_dtype(parse_text(name))
            if dtype is not None:
                dtypes.append(dtype)
    return read_signature(names, tuple(input_shapes), tuple(output_shapes), dtypes)


def _parse_shapes(shapes: Shapes) -> list[tuple[int, ...]]:
    return [tuple(map(parse_int, shape)) for shape in shapes]
