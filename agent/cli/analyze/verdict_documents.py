"""A verdict as the API tells an incident, without what only a server that watched could know."""

from __future__ import annotations

from typing import Any

from hangwatch.model.calls import Call, Site
from hangwatch.model.groups import Group
from hangwatch.model.verdicts import AlignedPair, CallClass, Divergence, Verdict


def build_document(verdict: Verdict) -> dict[str, Any]:
    group = verdict.group
    return {
        "kind": verdict.kind.value,
        "severity": verdict.severity.value,
        "status": "open",
        "job": "dump",
        "summary": verdict.summary,
        "advice": verdict.advice,
        "culprits": list(verdict.culprits),
        "waiting": list(verdict.waiting),
        "group": group and _build_group(group),
        "seq": verdict.seq,
        "fields": list(verdict.differing_fields),
        "site": _build_site(verdict.site),
        "calls": list(map(_build_call_class, verdict.calls)),
        "divergence": verdict.divergence and _build_divergence(verdict.divergence),
        "waits": [
            {"rank": wait.rank, "for": wait.on_rank, "group": wait.group, "seq": wait.seq}
            for wait in verdict.waits
        ],
    }


def _build_group(group: Group) -> dict[str, Any]:
    return {
        "name": group.name,
        "desc": group.desc,
        "ranks": list(group.ranks),
        "backend": group.backend,
    }


def _build_call_class(call_class: CallClass) -> dict[str, Any]:
    splits = call_class.call.signature.splits
    return {
        "ranks": list(call_class.ranks),
        "seq": call_class.call.seq,
        **_build_call(call_class.call),
        "peer": call_class.call.peer,
        "splits": splits and [list(part) for part in splits],
    }


def _build_call(call: Call) -> dict[str, Any]:
    signature = call.signature
    return {
        "op": signature.op,
        "shapes": [list(shape) for shape in signature.shapes],
        "dtype": signature.dtype,
        "root": signature.root,
        "site": _build_site(call.site),
    }


def _build_divergence(divergence: Divergence) -> dict[str, Any]:
    return {
        "group": _build_group(divergence.group),
        "since_seq": divergence.since_seq,
        "note": divergence.note,
        "sides": [{"ranks": list(ranks)} for ranks in divergence.sides],
        "rows": list(map(_build_row, divergence.rows)),
    }


def _build_row(row: AlignedPair) -> dict[str, Any]:
    return {
        "seq": [call and call.seq for call in row.calls],
        "calls": [call and _build_call(call) for call in row.calls],
        "omitted": row.omitted,
    }


def _build_site(site: Site | None) -> dict[str, Any] | None:
    return (
        None if site is None else {"file": site.file, "line": site.line, "function": site.function}
    )
