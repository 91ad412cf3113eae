"""Reads an incident back from its JSON document. Documents of older releases may lack the fields
that were added later; these then have their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from hangwatch.model.calls import Call, Signature, Site
from hangwatch.model.device import DevicePosition
from hangwatch.model.groups import Group, OutsideMember
from hangwatch.model.hardware import HostObservation, MissingEvidence, Observation, Weight
from hangwatch.model.incidents import Incident, MergedStack, ProcessSnapshot, Resolution
from hangwatch.model.kind_spec import Severity
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.ranks import ExceptionInfo
from hangwatch.model.recoveries import RankAbort, Recovery
from hangwatch.model.threads import Frame
from hangwatch.model.verdicts import AlignedPair, CallClass, Divergence, Verdict, Wait

from .flight_files import parse_flight_file

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
