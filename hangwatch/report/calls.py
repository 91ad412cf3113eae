"""Calls as lines of text, one line for each call as it arrives, and their counts. Pure, from the
API's JSON documents; see `hangwatch.report.terminal`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from .text import PLAIN_PAINT, Paint, clean_text, group_name

_VALUE_FIELDS = ("mean", "min", "max", "norm")


def format_call(document: Mapping[str, Any], paint: Paint = PLAIN_PAINT) -> Iterator[str]:
    """``12:00:01.123  rank 0  all_reduce [64] float32 sum  default_pg 812  train.py:41 in step  ≤
    1.2 ms``.
    """
    group, site = document.get("group"), document.get("site")
    name = group_name(group.get("name"), group.get("desc")) if group else "?"
    columns = (
        _format_time(document.get("at")),
        f"rank {clean_text(document.get('rank', '?'))}",
        _format_arguments(document, paint),
        f"{name} {clean_text(document.get('seq', '?'))}",
        paint.dim(_format_site(site) if site else ""),
        _format_latency(document, paint),
    )
    yield "  ".join(column for column in columns if column)
    values = document.get("values")
    if values:
        yield f"    {_format_values(values, paint)}"


def _format_arguments(document: Mapping[str, Any], paint: Paint) -> str:
    """``all_reduce [64] float32 sum``."""
    words = [paint.bold(clean_text(document.get("op", "?")))]
    for shape in document.get("shapes") or []:
        words.append(f"[{', '.join(map(clean_text, shape))}]")
    words.append(clean_text(document.get("dtype") or ""))
    words.append(clean_text(document.get("reduce_op") or ""))
    for name in ("root", "peer"):
        if document.get(name) is not None:
            words.append(f"{name} {clean_text(document[name])}")
    if document.get("async"):
        words.append("async")
    return " ".join(word for word in words if word)


def _format_values(values: Mapping[str, Any], paint: Paint) -> str:
    """``mean 0.5  min 0  max 1  norm 8  all finite``."""
    columns: list[str] = []
    for name in _VALUE_FIELDS:
        value = values.get(name)
        columns.append(f"{name} -" if value is None else f"{name} {value:.6g}")
    nonfinite_count = int(values.get("nonfinite") or 0)
    if nonfinite_count:
        columns.append(paint.as_error(f"{nonfinite_count} NaN or infinite"))
    else:
        columns.append("all finite")
    return "  ".join(columns)


def _format_site(site: Mapping[str, Any]) -> str:
    file = clean_text(site.get("file", "?")).rsplit("/", 1)[-1]
    return f"{file}:{clean_text(site.get('line', '?'))} in {clean_text(site.get('function', '?'))}"


def _format_time(stamp: object) -> str:
    """The time of day in the reader's time zone, with milliseconds."""
    try:
        time = datetime.fromisoformat(str(stamp).replace("Z", "+00:00")).astimezone()
    except ValueError:
        return "?"
    return f"{time:%H:%M:%S.%f}"[:-3]


def _format_latency(document: Mapping[str, Any], paint: Paint) -> str:
    if document.get("raised"):
        return paint.as_error("raised")
    seconds = document.get("within_s")
    if seconds is not None:
        return f"≤ {format_duration(seconds)}"
    return paint.as_warning("unfinished") if document.get("pending") else ""


def format_duration(seconds: float) -> str:
    """
    >>> format_duration(0.000012), format_duration(0.0123), format_duration(2.5), format_duration(75)
    ('12 µs', '12.3 ms', '2.5 s', '75 s')
    """
    for unit, size, most in (("µs", 1e-6, 1e-3), ("ms", 1e-3, 1.0)):
        if seconds < most:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def format_call_counts(
    items: Iterable[Mapping[str, Any]], missed: int, paint: Paint = PLAIN_PAINT
) -> Iterator[str]:
    """The number of calls of each operation, and the number of ranks that made any."""
    call_counts: Counter[str] = Counter()
    rank_counts: Counter[str] = Counter()
    for item in items:
        op = clean_text(item["op"])
        call_counts[op] += item["calls"]
        rank_counts[op] += 1
    if call_counts:
        yield ""
        yield paint.bold(f"{'calls':>9}  op")
    has_several_ranks = any(count > 1 for count in rank_counts.values())
    for op, call_count in call_counts.most_common():
        line = f"{call_count:>9,}  {op}"
        if has_several_ranks:
            line += f"  ({rank_counts[op]} rank{'s' if rank_counts[op] > 1 else ''})"
        yield line
    if missed:
        yield paint.as_warning(f"{missed:>9,}  not shown")
