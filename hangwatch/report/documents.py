"""The JSON documents of verdicts and incidents, as the contract of the API defines them.

`hangwatch analyze --json`, the server's API, its alerts and its database all use these functions.

MERGED: Reads an incident back from its JSON document. Documents of older releases may lack the
fields that were added later; these then have their defaults.

MERGED: What a rank's Flight Recorder file says of its unfinished calls: as a JSON document, read
back from it, and as text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from hangwatch.model.calls import Call, Signature, Site
from hangwatch.model.groups import Group, OutsideMember
from hangwatch.model.hardware import HostObservation, MissingEvidence, Observation, Weight
from hangwatch.model.incidents import (
    FlightFile,
    Incident,
    MergedStack,
    ProcessSnapshot,
    RankAbort,
    Recovery,
    Resolution,
    UnfinishedCall,
)
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.ranks import ExceptionInfo, Frame
from hangwatch.model.verdicts import (
    AlignedPair,
    CallClass,
    DevicePosition,
    Divergence,
    Verdict,
    Wait,
)

from .text import clean_text, group_name, wrap_text

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


Document = Mapping[str, Any]


def parse_incident(document: Document) -> Incident:
    """The inverse of `build_incident_document`. Raises KeyError, TypeError or ValueError for a
    document that is not an incident's.
    """
    resolution = document.get("resolution")
    return Incident(
        id=document["id"],
        job=document["job"],
        attempt=document["attempt"],
        status=document["status"],
        onset_at=parse_time(document["onset_at"]),
        opened_at=parse_time(document["opened_at"]),
        resolved_at=_parse_optional_time(document.get("resolved_at")),
        resolution=None if resolution is None else Resolution(resolution),
        verdict=_parse_verdict(document),
        processes=tuple(_parse_process(item) for item in document.get("processes") or ()),
        stacks=tuple(_parse_stack(item) for item in document.get("stacks") or ()),
        device=tuple(_parse_device_position(item) for item in document.get("device") or ()),
        hardware=tuple(parse_host_observation(item) for item in document.get("hardware") or ()),
        hardware_missing=tuple(
            _parse_missing_evidence(item) for item in document.get("hardware_missing") or ()
        ),
        recovery=_parse_recovery(document.get("recovery")),
    )


def parse_time(text: str) -> datetime:
    """An RFC 3339 time. Raises ValueError for other text."""
    # Before Python 3.11, fromisoformat does not know the letter Z.
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def _parse_optional_time(text: str | None) -> datetime | None:
    return None if text is None else parse_time(text)


def _parse_verdict(document: Document) -> Verdict:
    return Verdict(
        kind=VerdictKind(document["kind"]),
        severity=Severity(document["severity"]),
        culprits=tuple(document["culprits"]),
        waiting=tuple(document["waiting"]),
        group=_parse_group(document.get("group")),
        seq=document.get("seq"),
        differing_fields=tuple(document.get("fields") or ()),
        calls=tuple(_parse_call_class(item) for item in document.get("calls") or ()),
        waits=tuple(_parse_wait(item) for item in document.get("waits") or ()),
        summary=document["summary"],
        advice=document["advice"],
        site=_parse_site(document.get("site")),
        divergence=_parse_divergence(document.get("divergence")),
    )


def _parse_group(document: Document | None) -> Group | None:
    if document is None:
        return None
    labels = document.get("outside", ())
    outside = [OutsideMember.create(-2 - n, label) for n, label in enumerate(labels)]
    return Group(
        name=document["name"],
        desc=document["desc"],
        ranks=(*document["ranks"], *outside),
        backend=document.get("backend", ""),
        foreign=document["name"] if outside else "",
    )


def _parse_site(document: Document | None) -> Site | None:
    if document is None:
        return None
    return Site(file=document["file"], line=document["line"], function=document["function"])


def _parse_call_class(document: Document) -> CallClass:
    return CallClass(ranks=tuple(document["ranks"]), call=_parse_call(document, document["seq"]))


def _parse_call(document: Document, seq: int) -> Call:
    splits = document.get("splits")
    signature = Signature(
        op=document["op"],
        shapes=tuple(tuple(shape) for shape in document.get("shapes") or ()),
        dtype=document.get("dtype"),
        reduce_op=document.get("reduce_op"),
        root=document.get("root"),
        splits=None if splits is None else (tuple(splits[0]), tuple(splits[1])),
        detail=document.get("detail"),
    )
    return Call(
        seq=seq,
        signature=signature,
        site=_parse_site(document.get("site")),
        peer=document.get("peer"),
        raised=document.get("raised", False),
    )


def _parse_divergence(document: Document | None) -> Divergence | None:
    if document is None:
        return None
    group = _parse_group(document["group"])
    first_side, second_side = document["sides"]
    if group is None:
        raise ValueError("a divergence without its group")
    return Divergence(
        group=group,
        sides=(tuple(first_side["ranks"]), tuple(second_side["ranks"])),
        rows=tuple(_parse_aligned_pair(row) for row in document["rows"]),
        since_seq=document.get("since_seq"),
        note=document.get("note", ""),
    )


def _parse_aligned_pair(document: Document) -> AlignedPair:
    first_call, second_call = document["calls"]
    first_seq, second_seq = document["seq"]
    return AlignedPair(
        calls=(
            None if first_call is None else _parse_call(first_call, first_seq),
            None if second_call is None else _parse_call(second_call, second_seq),
        ),
        omitted=document.get("omitted", 0),
    )


def _parse_wait(document: Document) -> Wait:
    return Wait(
        rank=document["rank"],
        on_rank=document["for"],
        group=document["group"],
        seq=document["seq"],
    )


def _parse_process(document: Document) -> ProcessSnapshot:
    raised = document.get("exception")
    flight_file = document.get("flight_file")
    exception = None
    if raised is not None:
        exception = ExceptionInfo(
            type=raised["type"], message=raised["message"], site=_parse_site(raised.get("site"))
        )
    return ProcessSnapshot(
        rank=document["rank"],
        host=document.get("host"),
        pid=document.get("pid"),
        state=document.get("state", "?"),
        exit_status=document.get("exit_status"),
        signal=document.get("signal"),
        exception=exception,
        flight_file=parse_flight_file(flight_file) if flight_file else None,
    )


def parse_host_observation(document: Document) -> HostObservation:
    return HostObservation(
        host=document["host"],
        observation=Observation(
            source=document["source"],
            about=document["about"],
            what=document["what"],
            before=document["before"],
            now=document["now"],
            weight=Weight(document["weight"]),
            age_s=document["age_s"],
        ),
    )


def _parse_missing_evidence(document: Document) -> MissingEvidence:
    return MissingEvidence(
        hosts=tuple(document["hosts"]),
        source=document["source"],
        reason=document["reason"],
        remedy=document["remedy"],
    )


def _parse_device_position(document: Document) -> DevicePosition:
    return DevicePosition(
        rank=document["rank"],
        group=document["group"],
        enqueued=document["enqueued"],
        started=document.get("started"),
        completed=document["completed"],
        source=document["source"],
        age_s=document.get("age_s", 0.0),
    )


def _parse_stack(document: Document) -> MergedStack:
    return MergedStack(
        ranks=tuple(document["ranks"]),
        thread=document.get("thread"),
        source=document["source"],
        taken_at=parse_time(document["taken_at"]),
        frames=tuple(_parse_frame(item) for item in document.get("frames") or ()),
        native=document.get("native", False),
        error=document.get("error"),
    )


def _parse_frame(document: Document) -> Frame:
    return Frame(
        function=document["function"],
        file=document["file"],
        line=document["line"],
        text=document.get("text"),
    )


def _parse_recovery(document: Document | None) -> Recovery | None:
    if document is None:
        return None
    return Recovery(
        state=document["state"],
        scope=document["scope"],
        ranks=tuple(document["ranks"]),
        number=document["number"],
        limit=document["limit"],
        planned_at=parse_time(document["planned_at"]),
        due_at=parse_time(document["due_at"]),
        announced_at=_parse_optional_time(document.get("announced_at")),
        done_at=_parse_optional_time(document.get("done_at")),
        why=document.get("why", ""),
        ends=tuple(_parse_rank_abort(end) for end in document.get("ends") or ()),
    )


def _parse_rank_abort(document: Document) -> RankAbort:
    return RankAbort(
        rank=document["rank"],
        host=document["host"],
        pid=document["pid"],
        ordered_at=parse_time(document["ordered_at"]),
        result=document.get("result", "ordered"),
        ended_at=_parse_optional_time(document.get("ended_at")),
        signal=document.get("signal"),
        error=document.get("error"),
    )


_MAX_CALLS_SHOWN = 3


def build_flight_file_document(file: FlightFile) -> dict[str, Any]:
    return {
        "path": file.path,
        "calls": [_build_call(call) for call in file.calls],
        "error": file.error,
    }


def _build_call(call: UnfinishedCall) -> dict[str, Any]:
    return {
        "group": call.group,
        "desc": call.desc,
        "seq": call.seq,
        "op": call.op,
        "shapes": [list(shape) for shape in call.shapes],
        "state": call.state,
        "waited_s": call.waited_s,
        "timeout_s": call.timeout_s,
        "timed_out": call.has_timed_out,
    }


def parse_flight_file(document: Mapping[str, Any]) -> FlightFile:
    """The inverse of `build_flight_file_document`. Raises KeyError or TypeError for another one."""
    return FlightFile(
        path=document["path"],
        calls=tuple(_parse_unfinished_call(call) for call in document.get("calls") or ()),
        error=document.get("error"),
    )


def _parse_unfinished_call(document: Mapping[str, Any]) -> UnfinishedCall:
    return UnfinishedCall(
        group=document["group"],
        desc=document.get("desc", ""),
        seq=document["seq"],
        op=document["op"],
        shapes=tuple(tuple(shape) for shape in document.get("shapes") or ()),
        state=document.get("state", ""),
        waited_s=document["waited_s"],
        timeout_s=document.get("timeout_s"),
    )


def format_flight_file(document: Mapping[str, Any]) -> Iterator[str]:
    """The calls that had timed out, or else those that had not completed; then the file's path."""
    calls = list(document.get("calls") or ())
    timed_out = [call for call in calls if call.get("timed_out")]
    for call in (timed_out or calls)[:_MAX_CALLS_SHOWN]:
        yield from wrap_text(_describe_call(call), indent="  ")
    reason = f" ({clean_text(document['error'])})" if document.get("error") else ""
    yield from wrap_text(
        f"Flight Recorder file: {clean_text(document.get('path', ''))}{reason}", indent="  "
    )


def _describe_call(call: Mapping[str, Any]) -> str:
    what = (
        f"{clean_text(call.get('op', '?'))}, number {call.get('seq', '?')} of group"
        f" {group_name(call.get('group'), call.get('desc'))}"
    )
    waited = f"{float(call.get('waited_s') or 0.0):.1f} s"
    if call.get("timed_out"):
        limit = f"{float(call.get('timeout_s') or 0.0):g} s"
        return f"watchdog timeout: {what}, after {waited} (its limit is {limit})"
    return f"unfinished: {what}, for {waited} ({clean_text(call.get('state') or 'unknown')})"
