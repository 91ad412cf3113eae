"""Calls as lines of text, one for each as it comes, and their counts: pure, from the API's JSON.
See `hangwatch.report.terminal`.
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
    shapes = " ".join(
        f"[{', '.join(clean_text(n) for n in shape)}]" for shape in document.get("shapes") or []
    )
    detail = [
        shapes,
        clean_text(document.get("dtype") or ""),
        clean_text(document.get("reduce_op") or ""),
    ]
    detail += [
        f"{name} {clean_text(document[name])}"
        for name in ("root", "peer")
        if document.get(name) is not None
    ]
    group, site = document.get("group"), document.get("site")
    where = (
        f"{group_name(group.get('name'), group.get('desc')) if group else '?'}"
        f" {clean_text(document.get('seq', '?'))}"
    )
    at = _format_site(site) if site else ""
    what = " ".join(
        part
        for part in (
            paint.bold(clean_text(document.get("op", "?"))),
            *detail,
            "async" if document.get("async") else "",
        )
        if part
    )
    parts = (
        _format_time(document.get("at")),
        f"rank {clean_text(document.get('rank', '?'))}",
        what,
        where,
        paint.dim(at),
        _format_latency(document, paint),
    )
    yield "  ".join(part for part in parts if part)
    if values := document.get("values"):
        numbers = [
            f"{name} {value:.6g}" if (value := values.get(name)) is not None else f"{name} -"
            for name in _VALUE_FIELDS
        ]
        bad = int(values.get("nonfinite") or 0)
        yield (
            "    "
            + "  ".join(numbers)
            + "  "
            + (paint.as_error(f"{bad} NaN or infinite") if bad else "all finite")
        )


def _format_site(site: Mapping[str, Any]) -> str:
    file = clean_text(site.get("file", "?")).rsplit("/", 1)[-1]
    return f"{file}:{clean_text(site.get('line', '?'))} in {clean_text(site.get('function', '?'))}"


def _format_time(stamp: object) -> str:
    """On the clock of whoever reads it."""
    try:
        return (
            f"{datetime.fromisoformat(str(stamp).replace('Z', '+00:00')).astimezone():%H:%M:%S.%f}"[
                :-3
            ]
        )
    except ValueError:
        return "?"


def _format_latency(document: Mapping[str, Any], paint: Paint) -> str:
    if document.get("raised"):
        return paint.as_error("raised")
    seconds = document.get("within_s")
    return (
        f"≤ {format_duration(seconds)}"
        if seconds is not None
        else paint.as_warning("unfinished")
        if document.get("pending")
        else ""
    )


def format_duration(seconds: float) -> str:
    """
    >>> duration(0.000012), duration(0.0123), duration(2.5), duration(75)
    ('12 µs', '12.3 ms', '2.5 s', '75 s')
    """
    for unit, size, most in (("µs", 1e-6, 1e-3), ("ms", 1e-3, 1.0)):
        if seconds < most:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def format_call_counts(
    items: Iterable[Mapping[str, Any]], missed: int, paint: Paint = PLAIN_PAINT
) -> Iterator[str]:
    """How many calls there were of each operation, and of how many ranks."""
    calls: Counter[str] = Counter()
    ranks: Counter[str] = Counter()
    for item in items:
        calls[clean_text(item["op"])] += item["calls"]
        ranks[clean_text(item["op"])] += 1
    if calls:
        yield ""
        yield paint.bold(f"{'calls':>9}  op")
    several = any(number > 1 for number in ranks.values())
    for op, number in calls.most_common():
        yield f"{number:>9,}  {op}" + (
            f"  ({ranks[op]} rank{'s' if ranks[op] > 1 else ''})" if several else ""
        )
    if missed:
        yield paint.as_warning(f"{missed:>9,}  not shown")
