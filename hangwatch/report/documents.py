"""The JSON documents of verdicts and incidents, as the contract of the API defines them, and the
objects that are read back from them. The server's API, its alerts, its database and the output of
`hangwatch analyze --json` all use these functions, and the HTTP schema is derived from
`list_members`.

The members of a document are the fields of its dataclass, unless `_MEMBERS` lists others. Documents
of older releases may lack the fields that were added later; these then have their defaults.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from datetime import datetime
from typing import Any, NamedTuple, TypeVar, cast, get_args, get_origin, get_type_hints

from hangwatch.model.calls import Call, JsonObject, Signature
from hangwatch.model.groups import Group, OutsideMember
from hangwatch.model.hardware import HostObservation, Observation
from hangwatch.model.incidents import Incident, UnfinishedCall
from hangwatch.model.ranks import Frame, Ranks
from hangwatch.model.verdicts import AlignedPair, CallClass, DevicePosition, Verdict, Wait

from .text import Document, parse_time

Conversion = Callable[[Any], Any]
T = TypeVar("T")

_VERDICT = (
    *("kind", "severity", "summary", "advice", "culprits", "waiting", "group", "seq"),
    *("fields=differing_fields", "site", "calls", "divergence", "waits"),
)
# The members of the documents that differ from the fields of the dataclass, in their order. Each is
# the path of an attribute; its key is the last name in the path, or the one before "=". "part.*"
# stands for all members of a part's document that are not listed before it.
_MEMBERS: Mapping[type, tuple[str, ...]] = {
    Verdict: _VERDICT,
    Incident: (
        *("id", "job", "attempt", "kind", "severity", "status"),
        *("onset_at", "opened_at", "resolved_at", "resolution", *_VERDICT),
        *("processes", "device", "hardware", "hardware_missing", "stacks", "kernels", "recovery"),
    ),
    Group: ("name", "desc", "ranks=known_ranks", "backend", "outside=outside_labels"),
    Wait: ("rank", "for=on_rank", "group", "seq"),
    Signature: ("op", "shapes", "dtype", "reduce_op", "root"),
    CallClass: (
        *("ranks", "call.seq", "call.signature.*", "call.peer"),
        *("call.signature.splits", "call.signature.detail", "call.site"),
    ),
    DevicePosition: ("rank", "group", "enqueued", "started", "completed", "source", "age_s"),
    AlignedPair: ("seq=seqs", "calls", "omitted"),
    Call: ("signature.*", "signature.detail", "raised", "site"),
    HostObservation: ("host", "observation.*"),
    Observation: ("source", "about", "what", "before", "now", "weight", "age_s"),
    UnfinishedCall: (
        *("group", "desc", "seq", "op", "shapes", "state", "waited_s", "timeout_s"),
        "timed_out=has_timed_out",
    ),
    Frame: ("function", "file", "line", "text"),
}


def _parse_members(document: Document) -> Ranks:
    """The known ranks of a group, then its other members."""
    labels = document.get("outside") or ()
    outside = [OutsideMember.create(-2 - number, label) for number, label in enumerate(labels)]
    return (*document["ranks"], *outside)


def _parse_aligned_calls(document: Document) -> tuple[Call | None, ...]:
    calls = []
    for seq, call in zip(document["seq"], document["calls"], strict=True):
        calls.append(None if call is None else parse_document(Call, {**call, "seq": seq}))
    return tuple(calls)


# The fields without a member of their own, and how they follow from the document.
_DERIVED_FIELDS: Mapping[type, Mapping[str, Callable[[Document], Any]]] = {
    Group: {
        "ranks": _parse_members,
        "foreign": lambda document: document["name"] if document.get("outside") else "",
    },
    AlignedPair: {"calls": _parse_aligned_calls},
    Call: {"seq": lambda document: document["seq"]},
}


class Codec(NamedTuple):
    """The conversions between a value and its JSON. None stays None."""

    build: Conversion
    parse: Conversion


class DocumentMember(NamedTuple):
    """One member of the documents of a dataclass."""

    key: str
    path: tuple[str, ...]  # the attribute whose value it has
    annotation: Any
    default: Any  # `dataclasses.MISSING` if there is none, or only a factory
    has_default_factory: bool
    get_value: Conversion
    codec: Codec | None  # None: the value is the same in JSON


def build_document(part: Any, omitted: Collection[str] = ()) -> JsonObject:
    """The document of a verdict, of an incident, or of a part of them, without some members."""
    document = {}
    for member in list_members(part.__class__):
        if member.key in omitted:
            continue
        value = member.get_value(part)
        if member.codec is not None and value is not None:
            value = member.codec.build(value)
        document[member.key] = value
    return document


def build_optional_document(part: Any) -> JsonObject | None:
    return None if part is None else build_document(part)


def build_incident_event(incident: Incident) -> JsonObject:
    """An incident's document without the parts that may be large."""
    large_parts = ("calls", "waits", "stacks", "kernels", "device", "hardware", "hardware_missing")
    return build_document(incident, large_parts)


def parse_document(cls: type[T], document: Document) -> T:
    """The inverse of `build_document`. Raises KeyError, TypeError or ValueError for other documents,
    such as one that lacks a member without a default.
    """
    return _construct(cls, list_members(cast("Hashable", cls)), 0, document)


def _construct(
    cls: type[T], members: Iterable[DocumentMember], depth: int, document: Document
) -> T:
    """An object of ``cls``, whose attributes are at ``depth`` in the paths of ``members``."""
    fields: Mapping[str, object] = cls.__dataclass_fields__  # type: ignore[attr-defined]
    values = {}
    for name, derive in _DERIVED_FIELDS.get(cls, {}).items():
        values[name] = derive(document)
    members_by_part: dict[str, list[DocumentMember]] = {}
    for member in members:
        name = member.path[depth]
        codec = member.codec
        if len(member.path) > depth + 1:
            members_by_part.setdefault(name, []).append(member)
        elif name in fields and name not in values:
            value = document.get(member.key)
            if value is not None:
                values[name] = value if codec is None else codec.parse(value)
            elif member.key in document and type(None) in get_args(member.annotation):
                values[name] = None
    for name, part_members in members_by_part.items():
        part = _find_attribute(cls, name)[0]
        values[name] = _construct(part, part_members, depth + 1, document)
    return cls(**values)


@functools.cache
def list_members(cls: Any) -> tuple[DocumentMember, ...]:
    """The members of the documents of a dataclass, in their order."""
    members: dict[str, DocumentMember] = {}
    for entry in _MEMBERS.get(cls) or [field.name for field in dataclasses.fields(cls)]:
        key, _, dotted_path = entry.rpartition("=")
        *parts, name = dotted_path.split(".")
        owner = cls
        for part in parts:
            owner = _find_attribute(owner, part)[0]
        if name == "*":
            for member in list_members(owner):
                path = (*parts, *member.path)
                get_value = operator.attrgetter(".".join(path))
                members.setdefault(member.key, member._replace(path=path, get_value=get_value))
            continue
        annotation, field = _find_attribute(owner, name)
        member = DocumentMember(
            key=key or name,
            path=(*parts, name),
            annotation=annotation,
            default=field.default,
            has_default_factory=field.default_factory is not dataclasses.MISSING,
            get_value=operator.attrgetter(dotted_path),
            codec=_find_codec(annotation),
        )
        members.setdefault(member.key, member)
    return tuple(members.values())


def _find_attribute(cls: Any, name: str) -> tuple[Any, dataclasses.Field[Any]]:
    """The annotation of a field or a property, and the field; a property is one without a default."""
    attribute = getattr(cls, name, None)
    if isinstance(attribute, property):
        return get_type_hints(attribute.fget)["return"], dataclasses.field()
    return _get_type_hints(cls)[name], cls.__dataclass_fields__[name]


_get_type_hints = functools.cache(get_type_hints)


def _find_codec(annotation: Any) -> Codec | None:
    arguments = get_args(annotation)
    if annotation is datetime:
        return Codec(build=format_time, parse=parse_time)
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return Codec(build=build_document, parse=functools.partial(parse_document, annotation))
    if isinstance(annotation, enum.EnumMeta):
        return Codec(build=operator.attrgetter("value"), parse=annotation)
    if type(None) in arguments:
        return _find_codec(arguments[0])
    if get_origin(annotation) is not tuple:
        return None
    codec = _find_codec(arguments[0])
    if codec is None:
        return Codec(build=list, parse=tuple)
    build, parse = codec
    return Codec(
        build=lambda items: [None if item is None else build(item) for item in items],
        parse=lambda items: tuple(None if item is None else parse(item) for item in items),
    )


def format_time(moment: datetime) -> str:
    """A time with a time zone as RFC 3339; UTC ends with ``Z``."""
    return moment.isoformat().replace("+00:00", "Z")
