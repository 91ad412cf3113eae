"""Writes a bundle's documents as Flight Recorder dumps, in the layout that PyTorch's own analyzer
reads.

The analyzer needs equal calls to be equal in all fields, so only calls whose arguments are known
are written: each rank's calls that the incident is about, and the newest call of each of its groups
if that is unfinished.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from hangwatch.model.calls import JsonObject
from hangwatch.model.operators import OPERATIONS, ListSide, OutputScale
from hangwatch.report.text import Document

from .entries import DTYPE_NAMES

LAYOUT_VERSION = "2.10"

# PyTorch's analyzer matches sends and receives only if they are coalesced, and fails on unknown
# names.
_ANALYZER_SPECS = {op: spec for op, spec in OPERATIONS.items() if spec.analyzer_name}
_RECORDER_DTYPES = {dtype: name for name, dtype in DTYPE_NAMES.items()} | {
    "bfloat16": "BFloat16",
    "bool": "Bool",
}


def export_dumps(
    incident: Document, ranks: Iterable[Document]
) -> tuple[dict[int, JsonObject], list[str]]:
    """The dump of each rank whose groups have known members, and the operations left out."""
    omitted_ops: set[str] = set()
    dumps = {}
    for rank in ranks:
        groups = rank.get("groups")
        if not groups or not all(group["ranks"] for group in groups):
            continue
        config = {}
        status = {}
        entries: list[JsonObject] = []
        for uid, group in enumerate(groups):
            name = group["name"]
            members = str(list(group["ranks"]))
            config[name] = {"name": name, "desc": group["desc"], "ranks": members}
            entered, completed = _get_position(group)
            if completed is None:
                completed = -1
            status[str(uid)] = {
                "last_enqueued_collective": entered,
                "last_started_collective": entered,
                "last_completed_collective": completed,
            }
            calls_by_seq = _select_calls(incident, rank, group, omitted_ops)
            for seq, call in sorted(calls_by_seq.items()):
                if call["op"] in _ANALYZER_SPECS:
                    state = "completed" if seq <= completed else "scheduled"
                    # The first record is not number 0, since there were others before it.
                    entries.append(_build_entry(len(entries) + 1, uid, group, call, state))
                else:
                    omitted_ops.add(str(call["op"]))
        dumps[int(rank["rank"])] = {
            "version": LAYOUT_VERSION,
            "pg_config": config,
            "pg_status": status,
            "entries": entries,
        }
    return dumps, sorted(omitted_ops)


def _get_position(group: Document) -> tuple[int, int | None]:
    """The last call that the rank has entered, and the last that it has completed if that is known."""
    completed = group.get("completed")
    return int(group["entered"]), None if completed is None else int(completed)


def _select_calls(
    incident: Document, rank: Document, group: Document, omitted_ops: set[str]
) -> dict[int, Document]:
    """The rank's calls of the incident's group by number; without any, its unfinished call."""
    about = incident.get("group") or {}
    is_about_group = all(group[name] == about.get(name) for name in ("name", "ranks"))
    collectives = []
    # The calls of a deadlock are of several groups.
    if is_about_group and incident.get("kind") != "deadlock":
        for call in incident.get("calls") or ():
            if call.get("peer") is None:
                collectives.append(call)
            else:
                omitted_ops.add(str(call["op"]))
    calls_by_seq = {call["seq"]: call for call in collectives if rank["rank"] in call["ranks"]}
    if calls_by_seq:
        return calls_by_seq
    entered, completed = _get_position(group)
    if completed is None or completed >= entered:
        return {}
    op = group["op"]
    for call in collectives:
        if call["seq"] == entered and call["op"] == op:
            return {entered: call}
    return {entered: {"seq": entered, "op": op}}


def _build_entry(
    record_id: int, pg_id: int, group: Document, call: Document, state: str
) -> JsonObject:
    spec = _ANALYZER_SPECS[call["op"]]
    seq = int(call["seq"])
    # A document has the shapes of one side, from which the other side follows.
    inputs = [list(shape) for shape in call.get("shapes") or ()]
    sizes = [math.prod(shape) for shape in inputs]
    member_count = len(group["ranks"])
    if spec.list_side is ListSide.OUTPUTS and spec.compares_shapes:
        inputs = inputs[:1] or [[]]
        outputs = [[member_count * sizes[0]]] if sizes else [[]]
    elif spec.output_scale is OutputScale.TIMES_MEMBERS:
        outputs = [[member_count * size] for size in sizes]
    elif spec.output_scale is OutputScale.PER_MEMBER:
        outputs = [[size // member_count] for size in sizes]
    else:
        inputs = outputs = inputs or [[]]
    dtype = str(call.get("dtype") or "")
    recorder_dtype = _RECORDER_DTYPES.get(dtype, dtype)
    frames = []
    site = call.get("site")
    if site:
        frames = [{"name": site["function"], "filename": site["file"], "line": site["line"]}]
    return {
        "record_id": record_id,
        "pg_id": pg_id,
        "process_group": (group["name"], group["desc"]),
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": f"gloo:{spec.analyzer_name}",
        "time_created_ns": 0,
        "input_sizes": inputs,
        "output_sizes": outputs,
        "input_dtypes": [recorder_dtype] * len(inputs),
        "output_dtypes": [recorder_dtype] * len(outputs),
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": state == "completed",
        "timeout_ms": 0,
        "is_p2p": False,
        "frames": frames,
    }
