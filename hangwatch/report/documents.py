"""The JSON documents of verdicts and incidents, as the contract of the API defines them.

`hangwatch analyze --json`, the server's API, its alerts and its database all use these functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from typing import Any

from hangwatch.model.calls import Call, Signature, Site
from hangwatch.model.device import DevicePosition
from hangwatch.model.groups import Group
from hangwatch.model.hardware import HostObservation, MissingEvidence
from hangwatch.model.incidents import Incident, MergedStack, ProcessSnapshot
from hangwatch.model.recoveries import RankAbort, Recovery
from hangwatch.model.threads import Frame
from hangwatch.model.verdicts import AlignedPair, CallClass, Divergence, Verdict, Wait

from .flight_files import build_flight_file_document

JsonObject = dict[str, Any]


def build_verdict_document(verdict: Verdict) -> JsonObject:
    """The part of an incident's document that the diagnosis provides."""
    return {
        "kind": verdict.kind.value,
        "severity": verdict.severity.value,
        "summary": verdict.summary,
        "advice": verdict.advice,
        "culprits": list(verdict.culprits),
        "waiting": list(verdict.waiting),
        "group": build_group_document(verdict.group),
        "seq": verdict.seq,
        "fields": list(verdict.differing_fields),
        "site": build_site_document(verdict.site),
        "calls": [_build_call_class(call_class) for call_class in verdict.calls],
        "divergence": build_divergence_document(verdict.divergence),
        "waits": build_wait_documents(verdict.waits),
    }


def build_incident_document(incident: Incident) -> JsonObject:
    """The whole document of an incident."""
    verdict = incident.verdict
    return {
        "id": incident.id,
        "job": incident.job,
        "attempt": incident.attempt,
        "kind": verdict.kind.value,
        "severity": verdict.severity.value,
        "status": incident.status,
        "onset_at": format_time(incident.onset_at),
        "opened_at": format_time(incident.opened_at),
        "resolved_at": format_optional_time(incident.resolved_at),
        "resolution": None if incident.resolution is None else incident.resolution.value,
        **build_verdict_document(verdict),
        "processes": [_build_process(process) for process in incident.processes],
        "device": [_build_device_position(position) for position in incident.device],
        "hardware": [_build_host_observation(entry) for entry in incident.hardware],
        "hardware_missing": [_build_missing_evidence(gap) for gap in incident.hardware_missing],
        "stacks": [build_stack_document(stack) for stack in incident.stacks],
        "recovery": build_recovery_document(incident.recovery),
    }


def build_incident_event(incident: Incident) -> JsonObject:
    """An incident's document without the parts that may be large: its calls, waits, stacks and
    device positions.
    """
    verdict = replace(incident.verdict, calls=(), waits=())
    document = build_incident_document(replace(incident, verdict=verdict, stacks=(), device=()))
    for key in ("calls", "waits", "stacks", "device", "hardware", "hardware_missing"):
        del document[key]
    return document


def build_group_document(group: Group | None) -> JsonObject | None:
    if group is None:
        return None
    return {
        "name": group.name,
        "desc": group.desc,
        "ranks": list(group.known_ranks),
        "backend": group.backend,
        "outside": [member.label for member in group.outside_members],
    }


def build_site_document(site: Site | None) -> JsonObject | None:
    if site is None:
        return None
    return {"file": site.file, "line": site.line, "function": site.function}


def build_signature_document(signature: Signature) -> JsonObject:
    """What all descriptions of a call begin with."""
    return {
        "op": signature.op,
        "shapes": [list(shape) for shape in signature.shapes],
        "dtype": signature.dtype,
        "reduce_op": signature.reduce_op,
        "root": signature.root,
    }


def _build_call_class(call_class: CallClass) -> JsonObject:
    call = call_class.call
    signature = call.signature
    splits = signature.splits
    return {
        "ranks": list(call_class.ranks),
        "seq": call.seq,
        **build_signature_document(signature),
        "peer": call.peer,
        "splits": None if splits is None else [list(sizes) for sizes in splits],
        "detail": signature.detail,
        "site": build_site_document(call.site),
    }


def build_divergence_document(divergence: Divergence | None) -> JsonObject | None:
    if divergence is None:
        return None
    return {
        "group": build_group_document(divergence.group),
        "since_seq": divergence.since_seq,
        "note": divergence.note,
        "sides": [{"ranks": list(ranks)} for ranks in divergence.sides],
        "rows": [_build_aligned_row(row) for row in divergence.rows],
    }


def _build_aligned_row(row: AlignedPair) -> JsonObject:
    return {
        "seq": [None if call is None else call.seq for call in row.calls],
        "calls": [None if call is None else _build_aligned_call(call) for call in row.calls],
        "omitted": row.omitted,
    }


def _build_aligned_call(call: Call) -> JsonObject:
    signature = call.signature
    return {
        **build_signature_document(signature),
        "detail": signature.detail,
        "raised": call.raised,
        "site": build_site_document(call.site),
    }


def build_wait_documents(waits: Iterable[Wait]) -> list[JsonObject]:
    return [
        {"rank": wait.rank, "for": wait.on_rank, "group": wait.group, "seq": wait.seq}
        for wait in waits
    ]


def _build_process(process: ProcessSnapshot) -> JsonObject:
    raised, flight_file = process.exception, process.flight_file
    exception = None
    if raised is not None:
        exception = {
            "type": raised.type,
            "message": raised.message,
            "site": build_site_document(raised.site),
        }
    return {
        "rank": process.rank,
        "host": process.host,
        "pid": process.pid,
        "state": process.state,
        "exit_status": process.exit_status,
        "signal": process.signal,
        "exception": exception,
        "flight_file": build_flight_file_document(flight_file) if flight_file else None,
    }


def _build_device_position(position: DevicePosition) -> JsonObject:
    return {
        "rank": position.rank,
        "group": position.group,
        "enqueued": position.enqueued,
        "started": position.started,
        "completed": position.completed,
        "source": position.source,
        "age_s": position.age_s,
    }


def _build_host_observation(entry: HostObservation) -> JsonObject:
    observation = entry.observation
    return {
        "host": entry.host,
        "source": observation.source,
        "about": observation.about,
        "what": observation.what,
        "before": observation.before,
        "now": observation.now,
        "weight": observation.weight.value,
        "age_s": observation.age_s,
    }


def _build_missing_evidence(gap: MissingEvidence) -> JsonObject:
    return {
        "hosts": list(gap.hosts),
        "source": gap.source,
        "reason": gap.reason,
        "remedy": gap.remedy,
    }


def build_stack_document(stack: MergedStack) -> JsonObject:
    return {
        "ranks": list(stack.ranks),
        "thread": stack.thread,
        "source": stack.source,
        "taken_at": format_time(stack.taken_at),
        "frames": [_build_frame(frame) for frame in stack.frames],
        "native": stack.native,
        "error": stack.error,
    }


def _build_frame(frame: Frame) -> JsonObject:
    return {
        "function": frame.function,
        "file": frame.file,
        "line": frame.line,
        "text": frame.text,
    }


def build_recovery_document(recovery: Recovery | None) -> JsonObject | None:
    if recovery is None:
        return None
    return {
        "state": recovery.state,
        "scope": recovery.scope,
        "ranks": list(recovery.ranks),
        "number": recovery.number,
        "limit": recovery.limit,
        "planned_at": format_time(recovery.planned_at),
        "due_at": format_time(recovery.due_at),
        "announced_at": format_optional_time(recovery.announced_at),
        "done_at": format_optional_time(recovery.done_at),
        "why": recovery.why,
        "ends": [_build_rank_abort(end) for end in recovery.ends],
    }


def _build_rank_abort(end: RankAbort) -> JsonObject:
    return {
        "rank": end.rank,
        "host": end.host,
        "pid": end.pid,
        "ordered_at": format_time(end.ordered_at),
        "result": end.result,
        "ended_at": format_optional_time(end.ended_at),
        "signal": end.signal,
        "error": end.error,
    }


def format_time(moment: datetime) -> str:
    """A time with a time zone as RFC 3339; UTC ends with ``Z``."""
    return moment.isoformat().replace("+00:00", "Z")


def format_optional_time(moment: datetime | None) -> str | None:
    return None if moment is None else format_time(moment)
