"""A verdict as the API tells an incident, without what only a server that watched could know."""

from __future__ import annotations

from typing import Any

from hangwatch.model.calls import Call, Site
from hangwatch.model.groups import Group
from hangwatch.model.verdicts import Aligned, CallClass, Divergence, Verdict


def document(verdict: Verdict) -> dict[str, Any]:
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
        "group": group and _group(group),
        "seq": verdict.seq,
        "fields": list(verdict.fields),
        "site": _site(verdict.site),
        "calls": list(map(_class, verdict.calls)),
        "divergence": verdict.divergence and _divergence(verdict.divergence),
        "waits": [{"rank": wait.rank, "for": wait.on, "group": wait.group, "seq": wait.seq} for wait in verdict.waits],
    }


def _group(group: Group) -> dict[str, Any]:
    return {"name": group.name, "desc": group.desc, "ranks": list(group.ranks), "backend": group.backend}


def _class(told: CallClass) -> dict[str, Any]:
    splits = told.call.signature.splits
    return {
        "ranks": list(told.ranks),
        "seq": told.call.seq,
        **_call(told.call),
        "peer": told.call.peer,
        "splits": splits and [list(part) for part in splits],
    }


def _call(call: Call) -> dict[str, Any]:
    signature = call.signature
    return {
        "op": signature.op,
        "shapes": [list(shape) for shape in signature.shapes],
        "dtype": signature.dtype,
        "root": signature.root,
        "site": _site(call.site),
    }


def _divergence(found: Divergence) -> dict[str, Any]:
    return {
        "group": _group(found.group),
        "since_seq": found.since_seq,
        "note": found.note,
        "sides": [{"ranks": list(ranks)} for ranks in found.sides],
        "rows": list(map(_row, found.rows)),
    }


def _row(row: Aligned) -> dict[str, Any]:
    return {"seq": [call and call.seq for call in row.calls], "calls": [call and _call(call) for call in row.calls], "omitted": row.omitted}


def _site(site: Site | None) -> dict[str, Any] | None:
    return None if site is None else {"file": site.file, "line": site.line, "function": site.function}
