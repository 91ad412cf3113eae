"""Decodes the JSON parts of a ring: stream descriptions, call sites and signatures."""

from __future__ import annotations

import json
from typing import Any

from hangwatch.model.calls import Signature, Site, StreamKind
from hangwatch.model.groups import Group, unpack_ranks
from hangwatch.model.signatures import decode_signature


def _age_s(now_ns: int, then_ns: int) -> float:
    return max(0, now_ns - then_ns) / 1e9 if then_ns else 0.0


def _parse_object(raw: bytes) -> dict[str, Any] | None:
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _parse_description(data: dict[str, Any]) -> tuple[StreamKind, Group, int | None, int | None]:
    group = Group(
        name=str(data["name"]),
        desc=str(data["desc"]),
        ranks=unpack_ranks(str(data["ranks"])),
        backend=str(data.get("backend", "")),
        generation=int(data.get("generation", 1)),
        world_size=int(data.get("world", 0)),
    )
    peer, tag = data.get("peer"), data.get("tag")
    return (
        StreamKind(data["kind"]),
        group,
        None if peer is None else int(peer),
        None if tag is None else int(tag),
    )


def _parse_site(data: dict[str, Any] | None) -> Site | None:
    try:
        return (
            Site(file=str(data["file"]), line=int(data["line"]), function=str(data["function"]))
            if data
            else None
        )
    except (KeyError, TypeError, ValueError):
        return None


def _parse_signature(data: dict[str, Any] | None) -> Signature:
    """Decodes a signature. A lost or malformed one becomes operation "?", which never counts as
    different.
    """
    try:
        if data:
            return decode_signature(data)
    except (KeyError, TypeError, ValueError, IndexError):
        return Signature(op="?")
    return Signature(op="?")
