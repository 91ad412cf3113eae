"""PyTorch Flight Recorder dumps, as plain data: read leniently, since every version and backend writes them a little differently.

The layout is that of ``torch/csrc/distributed/c10d/FlightRecorder.hpp``: ``version``, ``pg_config``, ``pg_status`` and
``entries``, oldest first. What the recorder does not hold (reduce ops, roots, tags, split sizes) cannot be compared.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hangwatch.frames import innermost_user
from hangwatch.operators import Agree
from hangwatch.signature import with_agreement
from hangwatch.types import Frame, Signature, Site

MAJOR = "2"  # of the layout's version, which is not torch's: torch 2.5 writes 2.4, torch 2.13 writes 2.10

# What the recorder calls by another name than torch.distributed does.
_NAMES = {
    "_all_gather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "allreduce_coalesced": "all_reduce_coalesced",
    "all_reduce_barrier": "barrier",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
    "ALLGATHER_coalesced": "all_gather",
    "REDUCE_SCATTER_coalesced": "reduce_scatter",
}
_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8",
    "Byte": "uint8",
}  # fmt: skip
_COALESCED = re.compile(r"^(coalesced|[A-Z_]+_coalesced)$")  # ends a coalesced call; its parts come before it under the same number
_PEER = re.compile(r"^(?P<op>send|recv) (?P<mine>\d+)(?:->|<-)(?P<other>\d+)$")
_UNCOMPARED = ("all_to_all", "all_to_all_single", "all_to_all_v_single", "gather", "scatter", "barrier", "coalesced", "split", "new_window")
_BY_OUTPUT = ("all_gather",)  # its outputs are the same everywhere, even where the inputs are uneven
_IN_PLACE = ("all_reduce", "all_reduce_coalesced", "broadcast")


class DumpError(ValueError):
    """The data is no Flight Recorder dump."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One call; of a coalesced one, all its parts together. ``peer`` is the other end's rank in the group."""

    number: int  # of the record in the ring, from 0
    group: str
    seq: int
    signature: Signature
    totals: tuple[int, int] = (0, 0)  # elements of its inputs and outputs
    root: bool = False  # of a gather or scatter: only its root has the list
    peer: int | None = None
    done: bool = False  # as told by a backend whose states can be trusted
    retired: bool = False
    backend: str = ""
    site: Site | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """What one rank's recorder held. ``groups`` has the members of the process groups by name, where they are told."""

    rank: int
    version: str
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    descriptions: Mapping[str, str] = field(default_factory=dict)
    records: tuple[Record, ...] = ()
    uids: Mapping[str, str] = field(default_factory=dict)  # the recorder's number of a process group, and its name
    enqueued: Mapping[str, int] = field(default_factory=dict)  # by such a number: its newest collective
    wrapped: bool = False  # older records were overwritten, or left out

    @property
    def backends(self) -> set[str]:
        return {record.backend for record in self.records}


def read(rank: int, data: object) -> Dump:
    """A rank's dump from plain data. Raises DumpError, which says what is wrong with it."""
    if not isinstance(data, Mapping) or "version" not in data or not isinstance(data.get("pg_config", {}), Mapping):
        raise DumpError("it has no 'version' and 'pg_config', as Flight Recorder dumps have")
    version = str(data["version"])
    if version.split(".")[0] != MAJOR:
        raise DumpError(f"its layout is version {version}; this reads {MAJOR}.x, which torch 2.5 and later write")
    entries = data.get("entries") or []
    try:
        groups = {
            str(name): members
            for name, told in data.get("pg_config", {}).items()
            if name and (members := _members(told["ranks"]))  # gloo's table has one entry without a name, whatever the group
        }
        world = _members(data.get("pg_config", {}).get("", {}).get("ranks", []))
        descriptions = {str(e["process_group"][0]): str(e["process_group"][1]) for e in entries}
        for name, description in descriptions.items():
            if description == "default_pg" and world and name not in groups:
                groups[name] = world
        records = tuple(_record(parts) for parts in _calls(entries))
        numbers = [int(e["record_id"]) for e in entries]
        return Dump(
            rank=rank,
            version=version,
            groups=groups,
            descriptions=descriptions,
            records=records,
            uids=_counted(entries),
            enqueued={str(uid): int(told["last_enqueued_collective"]) for uid, told in (data.get("pg_status") or {}).items()},
            wrapped=not numbers or min(numbers) > 0 or max(numbers) >= len(numbers),
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise DumpError(f"its entries are not those of a Flight Recorder dump: {type(error).__name__}: {error}") from error


def _members(told: object) -> tuple[int, ...]:
    ranks = json.loads(told) if isinstance(told, str) else told
    return tuple(int(rank) for rank in ranks) if isinstance(ranks, (list, tuple)) else ()


def _calls(entries: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The entries by call: what is coalesced has one number. Point-to-point parts stay calls of their own, with the state of their end."""
    calls: dict[tuple[str, bool, int], list[Mapping[str, Any]]] = {}
    for entry in entries:
        p2p = bool(entry.get("is_p2p"))
        seq = entry["p2p_seq_id" if p2p else "collective_seq_id"]
        calls.setdefault((str(entry["process_group"][0]), p2p, int(seq)), []).append(entry)
    found: list[list[Mapping[str, Any]]] = []
    for (_, p2p, _), parts in calls.items():
        if p2p:
            end = next((part for part in parts if _COALESCED.match(_operation(part))), None)
            told = {} if end is None else {"state": end["state"], "retired": end.get("retired", False)}
            found += [[{**part, **told}] for part in parts if part is not end]
        else:
            found.append(parts)
    return found


def _operation(entry: Mapping[str, Any]) -> str:
    return str(entry["profiling_name"]).partition(":")[2]


def _record(parts: Sequence[Mapping[str, Any]]) -> Record:
    first, last = parts[0], parts[-1]
    backend = str(first["profiling_name"]).partition(":")[0]
    channel = _PEER.match(_operation(first))
    inputs, outputs = (_sizes(parts, "input_sizes"), _sizes(parts, "output_sizes"))
    return Record(
        number=int(first["record_id"]),
        group=str(first["process_group"][0]),
        seq=int(first["p2p_seq_id" if channel else "collective_seq_id"]),
        signature=_signature(channel["op"] if channel else _op(parts), inputs, outputs, parts),
        totals=(_numel(inputs), _numel(outputs)),
        root={"gather": outputs, "scatter": inputs}.get(_operation(first), ()) not in ((), ((),)),
        peer=int(channel["other"]) if channel else None,
        # Of the parts of a coalesced call only the end's state is ever updated.
        done=last["state"] == "completed",
        retired=bool(last.get("retired")),
        backend=backend,
        site=_site(last.get("frames") or first.get("frames") or ()),
    )


def _op(parts: Sequence[Mapping[str, Any]]) -> str:
    told = [_operation(part) for part in parts]
    if len(told) > 1 and told[-1] == "coalesced":
        told.pop()
    elif _COALESCED.match(told[-1]):
        told = told[-1:]
    return "+".join(dict.fromkeys(_NAMES.get(name, name) for name in told))


def _signature(
    op: str, inputs: tuple[tuple[int, ...], ...], outputs: tuple[tuple[int, ...], ...], parts: Sequence[Mapping[str, Any]]
) -> Signature:
    shapes = outputs if op == "recv" or (op in _BY_OUTPUT and outputs) else inputs
    if op in _IN_PLACE and inputs != outputs:
        shapes = inputs + outputs
    dtypes = {_dtype(name) for key in ("input_dtypes", "output_dtypes") for part in parts for name in _listed(part.get(key) or ())}
    agree = Agree.NOTHING if op in ("barrier", "coalesced") else Agree.DTYPE if op in _UNCOMPARED else Agree.DTYPE | Agree.SHAPE
    signature = Signature(
        op=op,
        shapes=shapes or outputs,
        dtype="/".join(sorted(dtypes)) or None,
        numel=_numel(shapes),
        splits=(tuple(map(math.prod, inputs)), tuple(map(math.prod, outputs))) if op.startswith("all_to_all") and len(inputs) > 1 else None,
    )
    return with_agreement(signature, agree, tuple(map(math.prod, shapes)))


def _sizes(parts: Sequence[Mapping[str, Any]], key: str) -> tuple[tuple[int, ...], ...]:
    coalesced = parts if len(parts) == 1 else [part for part in parts if not _COALESCED.match(_operation(part))]
    return tuple(tuple(int(n) for n in shape) for part in coalesced for shape in part.get(key) or ())


def _numel(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes))


def _listed(names: object) -> list[str]:
    return [names] if isinstance(names, str) else list(map(str, names)) if isinstance(names, (list, tuple)) else []


def _dtype(name: str) -> str:
    return _DTYPES.get(name, name.lower())


def _site(frames: Iterable[Mapping[str, Any]]) -> Site | None:
    told = [Frame(function=str(f["name"]), file=str(f["filename"]), line=int(f["line"])) for f in frames]
    frame = innermost_user(told)
    return None if frame is None else Site(file=frame.file, line=frame.line, function=frame.function)


def _counted(entries: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Process groups by number whose status counts collectives: gloo's and that of point-to-point calls count something else."""
    mixed = {e["process_group"][0] for e in entries if e.get("is_p2p") or str(e["profiling_name"]).startswith("gloo:")}
    return {str(e["pg_id"]): str(e["process_group"][0]) for e in entries if "pg_id" in e and e["process_group"][0] not in mixed}
