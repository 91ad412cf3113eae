"""A bundle's documents as Flight Recorder dumps, in the layout that PyTorch's own analyzer reads.

It needs equal calls to be equal in all their fields, so only what is known is written: of each rank
the calls that the incident is about, and the newest call of each of its groups where that is
unfinished.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hangwatch.model.operator_spec import ListSide, OperatorSpec, OutputScale
from hangwatch.model.operators import OPERATIONS

LAYOUT_VERSION = "2.10"

# PyTorch's analyzer matches sends and receives only where they are coalesced, and fails on names
# that it does not know.
_ANALYZER_SPECS = {op: spec for op, spec in OPERATIONS.items() if spec.analyzer_name}
_RECORDER_DTYPES = {
    "float32": "Float", "float64": "Double", "float16": "Half", "bfloat16": "BFloat16", "int64": "Long", "int32": "Int", "int16": "Short",
    "int8": "Char", "uint8": "Byte", "bool": "Bool",
}  # fmt: skip


def export_dumps(
    incident: Mapping[str, Any], ranks: Iterable[Mapping[str, Any]]
) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """One dump for each rank of which the groups' members are told, by rank, and the names of the
    calls that had to be left out.
    """
    left_out: set[str] = set()
    whole = (
        rank
        for rank in ranks
        if rank.get("groups") and all(group["ranks"] for group in rank["groups"])
    )
    dumps = {int(rank["rank"]): _build_dump(incident, rank, left_out) for rank in whole}
    return dumps, sorted(left_out)


def _build_dump(
    incident: Mapping[str, Any], rank: Mapping[str, Any], left_out: set[str]
) -> dict[str, Any]:
    subject = (
        incident.get("group") or {} if incident.get("kind") != "deadlock" else {}
    )  # whose calls are of several groups
    entries: list[dict[str, Any]] = []
    status: dict[str, dict[str, int]] = {}
    for uid, group in enumerate(rank["groups"]):
        about: dict[int, Mapping[str, Any]] = {}
        told = (
            incident.get("calls") or ()
            if (group["name"], group["ranks"]) == (subject.get("name"), subject.get("ranks"))
            else ()
        )
        left_out.update(str(call["op"]) for call in told if call.get("peer") is not None)
        told = [call for call in told if call.get("peer") is None]
        about = {call["seq"]: call for call in told if rank["rank"] in call["ranks"]}
        entered, completed = int(group["entered"]), group.get("completed")
        if not about and completed is not None and completed < entered:
            same = (call for call in told if (call["seq"], call["op"]) == (entered, group["op"]))
            about = {entered: next(same, {"seq": entered, "op": group["op"]})}
        for seq, call in sorted(about.items()):
            if call["op"] in _ANALYZER_SPECS:
                done = completed is not None and seq <= completed
                # The first record is not number 0, since there were others before.
                entries.append(
                    _build_entry(
                        len(entries) + 1, uid, group, call, "completed" if done else "scheduled"
                    )
                )
            else:
                left_out.add(str(call["op"]))
        status[str(uid)] = {
            "last_enqueued_collective": entered,
            "last_started_collective": entered,
            "last_completed_collective": -1 if completed is None else int(completed),
        }
    return {
        "version": LAYOUT_VERSION,
        "pg_config": {
            g["name"]: {"name": g["name"], "desc": g["desc"], "ranks": str(list(g["ranks"]))}
            for g in rank["groups"]
        },
        "pg_status": status,
        "entries": entries,
    }


def _build_entry(
    record_id: int, pg_id: int, group: Mapping[str, Any], call: Mapping[str, Any], state: str
) -> dict[str, Any]:
    spec = _ANALYZER_SPECS[call["op"]]
    inputs, outputs = _infer_shapes(
        spec, [list(shape) for shape in call.get("shapes") or ()], len(group["ranks"])
    )
    dtype = str(call.get("dtype") or "")
    site = call.get("site")
    return {
        "record_id": record_id,
        "pg_id": pg_id,
        "process_group": (group["name"], group["desc"]),
        "collective_seq_id": int(call["seq"]),
        "p2p_seq_id": 0,
        "op_id": int(call["seq"]),
        "profiling_name": f"gloo:{spec.analyzer_name}",
        "time_created_ns": 0,
        "input_sizes": inputs,
        "output_sizes": outputs,
        "input_dtypes": [_RECORDER_DTYPES.get(dtype, dtype)] * len(inputs),
        "output_dtypes": [_RECORDER_DTYPES.get(dtype, dtype)] * len(outputs),
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": state == "completed",
        "timeout_ms": 0,
        "is_p2p": False,
        "frames": (
            [{"name": site["function"], "filename": site["file"], "line": site["line"]}]
            if site
            else []
        ),
    }


def _infer_shapes(
    spec: OperatorSpec, shapes: list[list[int]], member_count: int
) -> tuple[Sequence[list[int]], Sequence[list[int]]]:
    """Of inputs and outputs; hangwatch keeps those of one side, from which the other follows."""
    numel = [math.prod(shape) for shape in shapes]
    if spec.list_side is ListSide.OUTPUTS and spec.compares_shapes:
        return shapes[:1] or [[]], [[member_count * n for n in numel[:1]]] if shapes else [[]]
    if spec.output_scale is OutputScale.TIMES_MEMBERS:
        return shapes, [[member_count * n] for n in numel]
    if spec.output_scale is OutputScale.PER_MEMBER:
        return shapes, [[n // member_count] for n in numel]
    return shapes or [[]], shapes or [[]]
