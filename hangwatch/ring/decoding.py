"""Decodes the JSON that a ring interns: groups, call sites, signatures."""

from __future__ import annotations

import json
from typing import Any

from hangwatch.model.calls import SequenceKind, Signature, Site
from hangwatch.model.groups import Group, unpack_ranks
from hangwatch.model.signatures import decode_signature


def _age(now_ns: int, then_ns: int) -> float:
    return max(0, now_ns - then_ns) / 1e9 if then_ns else 0.0


def _object(raw: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _describe(told: dict[str, Any]) -> tuple[SequenceKind, Group, int | None, int | None]:
    group = Group(
        name=str(told["name"]),
        desc=str(told["desc"]),
        ranks=unpack_ranks(str(told["ranks"])),
        backend=str(told.get("backend", "")),
        generation=int(told.get("generation", 1)),
        world=int(told.get("world", 0)),
    )
    peer, tag = told.get("peer"), told.get("tag")
    return SequenceKind(told["kind"]), group, None if peer is None else int(peer), None if tag is None else int(tag)


def _site(told: dict[str, Any] | None) -> Site | None:
    try:
        return Site(file=str(told["file"]), line=int(told["line"]), function=str(told["function"])) if told else None
    except (KeyError, TypeError, ValueError):
        return None


def _signature(told: dict[str, Any] | None) -> Signature:
    """What is no longer there, or is not understood, is an unnamed operation: it never counts as different."""
    try:
        if told:
            return decode_signature(told)
    except (KeyError, TypeError, ValueError, IndexError):
        return Signature(op="?")
    return Signature(op="?")
