"""The JSON documents of verdicts and incidents, as the contract of the API defines them, and the
objects that are read back from them. The server's API, its alerts, its database and the output of
`hangwatch analyze --json` all use these functions.

The fields of most dataclasses are the fields of their documents, which `build_document` and
`parse_document` derive. Documents of older releases may lack the fields that were added later;
these then have their defaults.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from hangwatch.model.calls import Call, Signature, Site
from hangwatch.model.groups import Group, OutsideMember
from hangwatch.model.hardware import HostObservation, MissingEvidence, Observation, Weight
from hangwatch.model.incidents import (
    Incident,
    MergedStack,
    ProcessSnapshot,
    Recovery,
    Resolution,
    UnfinishedCall,
)
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.ranks import Frame
from hangwatch.model.verdicts import (
    AlignedPair,
    CallClass,
    DevicePosition,
    Divergence,
    Verdict,
    Wait,
)

from .text import Document

JsonObject = dict[str, Any]
T = TypeVar("T")

# The fields that a document lacks, and the properties that it has beside the fields.
_OMITTED_FIELDS: Mapping[type, tuple[str, ...]] = {Frame: ("handler", "polls")}
_PROPERTIES: Mapping[type, Mapping[str, str]] = {UnfinishedCall: {"timed_out": "has_timed_out"}}
_FIELDS: dict[type, tuple[tuple[str, _Codec | None], ...]] = {}  # the results of `_list_fields`


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
        "site": build_optional_document(verdict.site),
        "calls": [_build_call_class(call_class) for call_class in verdict.calls],
        "divergence": build_divergence_document(verdict.divergence),
        "waits": [
            {"rank": wait.rank, "for": wait.on_rank, "group": wait.group, "seq": wait.seq}
            for wait in verdict.waits
        ],
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
        "resolved_at": None if incident.resolved_at is None else format_time(incident.resolved_at),
        "resolution": None if incident.resolution is None else incident.resolution.value,
        **build_verdict_document(verdict),
        "processes": [build_document(process) for process in incident.processes],
        "device": [build_document(position) for position in incident.device],
        "hardware": [_build_host_observation(entry) for entry in incident.hardware],
        "hardware_missing": [build_document(gap) for gap in incident.hardware_missing],
        "stacks": [build_document(stack) for stack in incident.stacks],
        "recovery": build_optional_document(incident.recovery),
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


def build_signature_document(signature: Signature) -> JsonObject:
    """The fields with which all documents of a call begin."""
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
        "site": build_optional_document(call.site),
    }


def build_divergence_document(divergence: Divergence | None) -> JsonObject | None:
    if divergence is None:
        return None
    return {
        "group": build_group_document(divergence.group),
        "since_seq": divergence.since_seq,
        "note": divergence.note,
        "sides": [{"ranks": list(ranks)} for ranks in divergence.sides],
        "rows": [
            {
                "seq": [None if call is None else call.seq for call in row.calls],
                "calls": [_build_aligned_call(call) for call in row.calls],
                "omitted": row.omitted,
            }
            for row in divergence.rows
        ],
    }


def _build_aligned_call(call: Call | None) -> JsonObject | None:
    if call is None:
        return None
    signature = call.signature
    return {
        **build_signature_document(signature),
        "detail": signature.detail,
        "raised": call.raised,
        "site": build_optional_document(call.site),
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


def build_document(part: Any) -> JsonObject:
    """The document of a part of an incident whose fields are those of its dataclass."""
    document: JsonObject = {}
    for name, codec in _list_fields(type(part)):
        value = getattr(part, name)
        document[name] = value if codec is None or value is None else codec.build(value)
    for name, attribute in _PROPERTIES.get(type(part), {}).items():
        document[name] = getattr(part, attribute)
    return document


def build_optional_document(part: Any) -> JsonObject | None:
    return None if part is None else build_document(part)


def parse_document(cls: type[T], document: Document) -> T:
    """The inverse of `build_document`. Raises TypeError for a missing field without a default."""
    values: dict[str, Any] = {}
    for name, codec in _list_fields(cls):
        value = document.get(name)
        if value is not None:
            values[name] = value if codec is None else codec.parse(value)
    return cls(**values)


def _parse_documents(cls: type[T], documents: Iterable[Document] | None) -> tuple[T, ...]:
    return tuple(parse_document(cls, document) for document in documents or ())


class _Codec(NamedTuple):
    """The conversions between a field's value and its JSON."""

    build: Callable[[Any], Any]
    parse: Callable[[Any], Any]


def _list_fields(cls: Any) -> tuple[tuple[str, _Codec | None], ...]:
    """The fields of a dataclass's document; a value without a codec is the same in JSON."""
    fields = _FIELDS.get(cls)
    if fields is None:
        fields = _FIELDS[cls] = tuple(_iter_fields(cls))
    return fields


def _iter_fields(cls: Any) -> Iterator[tuple[str, _Codec | None]]:
    types = get_type_hints(cls)
    omitted = _OMITTED_FIELDS.get(cls, ())
    for field in dataclasses.fields(cls):
        if field.name not in omitted:
            yield field.name, _find_codec(types[field.name])


def _find_codec(annotation: Any) -> _Codec | None:
    arguments = get_args(annotation)
    if annotation is datetime:
        return _Codec(build=format_time, parse=parse_time)
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return _Codec(
            build=build_document, parse=lambda document: parse_document(annotation, document)
        )
    if type(None) in arguments:
        return _find_codec(arguments[0])
    if get_origin(annotation) is not tuple:
        return None
    codec = _find_codec(arguments[0])
    if codec is None:
        return _Codec(build=list, parse=tuple)
    build, parse = codec
    return _Codec(
        build=lambda items: [build(item) for item in items],
        parse=lambda items: tuple(parse(item) for item in items),
    )


def format_time(moment: datetime) -> str:
    """A time with a time zone as RFC 3339; UTC ends with ``Z``."""
    return moment.isoformat().replace("+00:00", "Z")


def parse_incident(document: Document) -> Incident:
    """The inverse of `build_incident_document`. Raises KeyError, TypeError or ValueError for a
    document that is not an incident's.
    """
    resolved_at, resolution = document.get("resolved_at"), document.get("resolution")
    recovery = document.get("recovery")
    return Incident(
        id=document["id"],
        job=document["job"],
        attempt=document["attempt"],
        status=document["status"],
        onset_at=parse_time(document["onset_at"]),
        opened_at=parse_time(document["opened_at"]),
        resolved_at=None if resolved_at is None else parse_time(resolved_at),
        resolution=None if resolution is None else Resolution(resolution),
        verdict=_parse_verdict(document),
        processes=_parse_documents(ProcessSnapshot, document.get("processes")),
        stacks=_parse_documents(MergedStack, document.get("stacks")),
        device=_parse_documents(DevicePosition, document.get("device")),
        hardware=tuple(parse_host_observation(item) for item in document.get("hardware") or ()),
        hardware_missing=_parse_documents(MissingEvidence, document.get("hardware_missing")),
        recovery=None if recovery is None else parse_document(Recovery, recovery),
    )


def parse_time(text: str) -> datetime:
    """An RFC 3339 time. Raises ValueError for other text."""
    # Before Python 3.11, fromisoformat does not know the letter Z.
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def _parse_site(document: Document) -> Site | None:
    """The site in a verdict's or a call's document."""
    site = document.get("site")
    return None if site is None else parse_document(Site, site)


def _parse_verdict(document: Document) -> Verdict:
    return Verdict(
        kind=VerdictKind(document["kind"]),
        severity=Severity(document["severity"]),
        culprits=tuple(document["culprits"]),
        waiting=tuple(document["waiting"]),
        group=_parse_group(document.get("group")),
        seq=document.get("seq"),
        differing_fields=tuple(document.get("fields") or ()),
        calls=tuple(
            CallClass(ranks=tuple(item["ranks"]), call=_parse_call(item, item["seq"]))
            for item in document.get("calls") or ()
        ),
        waits=tuple(
            Wait(rank=item["rank"], on_rank=item["for"], group=item["group"], seq=item["seq"])
            for item in document.get("waits") or ()
        ),
        summary=document["summary"],
        advice=document["advice"],
        site=_parse_site(document),
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
        site=_parse_site(document),
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
