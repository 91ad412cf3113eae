"""Decodes the JSON parts of a ring: stream descriptions, call sites and signatures."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hangwatch.model.calls import Signature, Site, StreamKind
from hangwatch.model.groups import Group, unpack_ranks
from hangwatch.model.signatures import UNKNOWN_OP, decode_signature


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamDescription:
    """What never changes about a stream."""

    kind: StreamKind
    group: Group
    # Global rank, or number in a foreign group; -1: any source; None: a stream of collectives
    peer: int | None
    tag: int | None


def compute_age_s(now_ns: int, then_ns: int) -> float:
    """The seconds since ``then_ns``; 0 if that is unset or in the future."""
    return max(0, now_ns - then_ns) / 1e9 if then_ns else 0.0


def parse_object(raw: bytes) -> dict[str, Any] | None:
    """A JSON object; None if the bytes are anything else."""
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def parse_description(data: dict[str, Any]) -> StreamDescription | None:
    """The description of a stream; None if it is malformed."""
    try:
        group = Group(
            name=str(data["name"]),
            desc=str(data["desc"]),
            ranks=unpack_ranks(str(data["ranks"])),
            backend=str(data.get("backend", "")),
            generation=int(data.get("generation", 1)),
            world_size=int(data.get("world", 0)),
            foreign=str(data.get("foreign", "")),
            number=int(data.get("number", -1)),
        )
        peer, tag = data.get("peer"), data.get("tag")
        return StreamDescription(
            kind=StreamKind(data["kind"]),
            group=group,
            peer=None if peer is None else int(peer),
            tag=None if tag is None else int(tag),
        )
    except (KeyError, TypeError, ValueError):
        return None


def parse_site(data: dict[str, Any] | None) -> Site | None:
    """A call site; None if it is lost or malformed."""
    if not data:
        return None
    try:
        return Site(file=str(data["file"]), line=int(data["line"]), function=str(data["function"]))
    except (KeyError, TypeError, ValueError):
        return None


def parse_signature(data: dict[str, Any] | None) -> Signature:
    """A signature. A lost or malformed one becomes operation "?", which never counts as
    different.
    """
    if not data:
        return Signature(op=UNKNOWN_OP)
    try:
        return decode_signature(data)
    except (KeyError, TypeError, ValueError, IndexError):
        return Signature(op=UNKNOWN_OP)
