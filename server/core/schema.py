"""The HTTP schema of the documents: pydantic's models, which are derived from the dataclasses that
`hangwatch.report.documents` encodes. They describe responses in ``/openapi.json`` and validate none.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from datetime import datetime
from typing import Any, Union, get_args, get_origin

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, GetCoreSchemaHandler, create_model
from pydantic_core import CoreSchema, core_schema

from hangwatch.model.calls import Call
from hangwatch.model.groups import Group
from hangwatch.model.hardware import HostObservation
from hangwatch.model.incidents import Incident, MergedStack, ProcessSnapshot, UnfinishedCall
from hangwatch.model.verdicts import AlignedPair, Wait
from hangwatch.report.documents import build_document, list_members


class ApiModel(BaseModel):
    model_config = ConfigDict(frozen=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Description:
    """What the schema of a dataclass has instead of the class's own."""

    name: str = ""
    text: str | None = None  # otherwise the first paragraph of the docstring
    defaults: Mapping[str, Any] = field(default_factory=dict)  # MISSING: the member is always there


_DESCRIPTIONS: Mapping[type, _Description] = {
    AlignedPair: _Description(
        name="AlignedRow",
        text="One call of each side, or null if that side made no corresponding call.",
    ),
    Call: _Description(name="AlignedCall", text=""),
    Group: _Description(name="GroupName", text="", defaults={"outside": ()}),
    HostObservation: _Description(defaults={"now": None, "weight": MISSING, "age_s": MISSING}),
    Incident: _Description(
        defaults={"severity": MISSING, "summary": MISSING, "advice": MISSING},
    ),
    MergedStack: _Description(name="Stack"),
    ProcessSnapshot: _Description(name="Process", text=""),
    UnfinishedCall: _Description(defaults={"desc": MISSING, "state": MISSING}),
    Wait: _Description(text="``rank`` waits for rank ``for``."),
}
_under_construction: set[type] = set()


@functools.cache
def describe_document(cls: type) -> type[BaseModel]:
    """The model of the documents of a dataclass."""
    description = _DESCRIPTIONS.get(cls, _Description())
    text = description.text
    if text is None and not (cls.__doc__ or "").startswith(f"{cls.__name__}("):
        text = (cls.__doc__ or "").partition("\n\n")[0]
    _under_construction.add(cls)
    members: dict[str, Any] = {}
    for member in list_members(cls):
        default = description.defaults.get(member.key, member.default)
        if isinstance(default, tuple):
            default = list(default)
        if default is not MISSING:
            model_field = Field(default=default)
        elif member.has_default_factory:
            model_field = Field(default_factory=list)
        else:
            model_field = Field()
        members[member.key] = _describe_annotation(member.annotation), model_field
    _under_construction.discard(cls)
    name = description.name or cls.__name__
    return create_model(name, __base__=ApiModel, __doc__=text or None, **members)


def _describe_annotation(annotation: Any) -> Any:
    arguments = get_args(annotation)
    if annotation is datetime:
        return AwareDatetime
    if annotation in _under_construction:
        return annotation.__name__  # pydantic resolves it when the model is complete
    if hasattr(annotation, "__dataclass_fields__"):
        return describe_document(annotation)
    if get_origin(annotation) is tuple:
        return list[_describe_annotation(arguments[0])]  # type: ignore[misc]  # not static
    if type(None) in arguments:
        return Union[tuple(map(_describe_annotation, arguments))]  # noqa: UP007  # not static
    return annotation


class AsDocument:
    """Annotates a field of an `ApiModel` that has a dataclass, whose JSON is its document."""

    def __get_pydantic_core_schema__(
        self, source: type, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(
            lambda value, _: value,
            handler.generate_schema(describe_document(source)),
            serialization=core_schema.plain_serializer_function_ser_schema(build_document),
        )
