"""What a rank's Flight Recorder file says of its unfinished calls: as a JSON document, read back
from it, and as text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hangwatch.model.flight_dumps import FlightFile, UnfinishedCall

from .text import clean_text, group_name, wrap_text

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
        calls=tuple(_parse_call(call) for call in document.get("calls") or ()),
        error=document.get("error"),
    )


def _parse_call(document: Mapping[str, Any]) -> UnfinishedCall:
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
