"""The entries of a Flight Recorder dump, as they are written: names, numbers and tensors. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hangwatch.model.plain_data import parse_int, parse_text

from .signatures import COALESCED_PATTERN, Shapes

_MAX_TENSORS, _MAX_DIMENSIONS = 1 << 16, 64

# Sizes of inputs and of outputs, types of inputs and of outputs.
TensorFields = tuple[Shapes, Shapes, tuple[str, ...], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class FlightEntry:
    """One entry with its parsed identity. ``fields`` has all its fields, most of them unchecked."""

    record_id: int
    pg_id: str | None
    group: str
    description: str
    backend: str
    name: str
    is_p2p: bool
    seq: int
    fields: Mapping[str, Any]

    @classmethod
    def parse_entry(cls, fields: Mapping[str, Any], index: int) -> FlightEntry:
        """The entry at ``index`` of a dump. Raises KeyError, TypeError, ValueError or
        AttributeError if ``fields`` is not a valid entry.
        """
        group, description = fields["process_group"]
        backend, _, name = parse_text(fields["profiling_name"]).rpartition(":")
        is_p2p = bool(fields.get("is_p2p")) or name.startswith(("send ", "recv "))
        return cls(
            parse_int(fields.get("record_id", index)),
            str(parse_int(fields["pg_id"])) if "pg_id" in fields else None,
            parse_text(group),
            parse_text(description),
            backend,
            name,
            is_p2p,
            parse_int(fields["p2p_seq_id" if is_p2p else "collective_seq_id"]),
            fields,
        )

    @property
    def is_coalesced_end(self) -> bool:
        """Whether it is the last entry of a coalesced call, with the state of the whole call."""
        return bool(COALESCED_PATTERN.match(self.name))

    @property
    def created_ns(self) -> int:
        """When the call was made, in nanoseconds since the epoch; 0 if that is not recorded."""
        return parse_int(self.fields.get("time_created_ns") or 0)

    @property
    def shows_start(self) -> bool:
        """Whether it records that the device has started the call."""
        fields = self.fields
        return bool(fields.get("state") == "started" or fields.get("time_discovered_started_ns"))


def read_tensors(fields: Mapping[str, Any]) -> TensorFields:
    """The sizes and types of an entry's inputs and outputs, unparsed. Raises ValueError if there
    are more than a call can have.
    """
    inputs: Sequence[Any] = fields.get("input_sizes") or ()
    outputs: Sequence[Any] = fields.get("output_sizes") or ()
    input_dtypes: str | Sequence[str] = fields.get("input_dtypes") or ()
    output_dtypes: str | Sequence[str] = fields.get("output_dtypes") or ()
    tensor_count = max(len(inputs), len(outputs), len(input_dtypes), len(output_dtypes))
    dimension_count = max(map(len, (*inputs, *outputs)), default=0)
    if tensor_count > _MAX_TENSORS or dimension_count > _MAX_DIMENSIONS:
        raise ValueError("more tensors, or more dimensions, than a call has")
    return (
        tuple(map(tuple, inputs)),
        tuple(map(tuple, outputs)),
        _as_tuple(input_dtypes),
        _as_tuple(output_dtypes),
    )


def _as_tuple(dtypes: str | Sequence[str]) -> tuple[str, ...]:
    return (dtypes,) if isinstance(dtypes, str) else tuple(dtypes)
