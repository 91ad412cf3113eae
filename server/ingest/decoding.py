"""A heartbeat's JSON as `hangwatch.protocol.heartbeat`'s messages: checked by their annotations,
whoever sent it.

Nearly all that the server reads are heartbeats, so msgspec reads them, into structs with the fields
of these dataclasses: in a fifth of the time that making the dataclasses themselves takes. pydantic
reads what msgspec refuses: a number that is written as another type's it takes, and of anything
else it says what is wrong in all its places.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
import typing
from typing import Any, cast

import msgspec
from pydantic import ConfigDict, RootModel

from hangwatch.protocol import heartbeat


class Body(RootModel[heartbeat.Heartbeat]):
    """What a node agent says of its host."""  # in /openapi.json, too

    model_config = ConfigDict(allow_inf_nan=False)


def read(body: bytes) -> heartbeat.Heartbeat:
    """Raises pydantic.ValidationError."""
    try:
        return cast(
            heartbeat.Heartbeat, _decoder().decode(body)
        )  # it has all the fields, by the same names and types
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Body.model_validate_json(body).root


def sender(body: bytes) -> str | None:
    """The node agent whose heartbeat it is, in a tenth of the time; None for what is none."""
    try:
        return _sender().decode(body).agent
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


class _Sender(msgspec.Struct):
    agent: str


@functools.cache
def _sender() -> msgspec.json.Decoder[_Sender]:
    return msgspec.json.Decoder(_Sender)


@functools.cache
def _decoder() -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(_struct(heartbeat.Heartbeat))


@functools.cache
def _struct(message: type) -> type:
    """A struct with the fields of one of `hangwatch.protocol.heartbeat`'s dataclasses. Nothing in
    them can lead back to them: no need to collect them.
    """
    hints = typing.get_type_hints(message)
    fields = [(f.name, _of_structs(hints[f.name]), msgspec.NODEFAULT if f.default is dataclasses.MISSING else f.default) for f in
              dataclasses.fields(message)]  # fmt: skip
    return msgspec.defstruct(
        message.__name__, fields, module=__name__, frozen=True, kw_only=True, gc=False
    )


def _of_structs(hint: Any) -> Any:
    """An annotation, with structs in place of those dataclasses."""
    if dataclasses.is_dataclass(hint) and cast(type, hint).__module__ == heartbeat.__name__:
        return _struct(cast(type, hint))
    if not (parts := typing.get_args(hint)):
        return hint
    origin = typing.get_origin(hint)
    inner = tuple(_of_structs(part) for part in parts)
    return functools.reduce(operator.or_, inner) if origin is types.UnionType else origin[inner]
