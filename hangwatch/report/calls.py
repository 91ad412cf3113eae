"""Calls as lines of text, one for each as it comes, and their counts: pure, from the API's JSON. See `hangwatch.report.terminal`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from .text import PLAIN, Paint, clean, group_name

_VALUES = ("mean", "min", "max", "norm")


def call(told: Mapping[str, Any], paint: Paint = PLAIN) -> Iterator[str]:
    """``12:00:01.123  rank 0  all_reduce [64] float32 sum  default_pg 812  train.py:41 in step  ≤ 1.2 ms``."""
    shapes = " ".join(f"[{', '.join(clean(n) for n in shape)}]" for shape in told.get("shapes") or [])
    detail = [shapes, clean(told.get("dtype") or ""), clean(told.get("reduce_op") or "")]
    detail += [f"{name} {clean(told[name])}" for name in ("root", "peer") if told.get(name) is not None]
    group, site = told.get("group"), told.get("site")
    where = f"{group_name(group.get('name'), group.get('desc')) if group else '?'} {clean(told.get('seq', '?'))}"
    at = _place(site) if site else ""
    what = " ".join(part for part in (paint.bold(clean(told.get("op", "?"))), *detail, "async" if told.get("async") else "") if part)
    parts = (_time(told.get("at")), f"rank {clean(told.get('rank', '?'))}", what, where, paint.dim(at), _within(told, paint))
    yield "  ".join(part for part in parts if part)
    if values := told.get("values"):
        numbers = [f"{name} {value:.6g}" if (value := values.get(name)) is not None else f"{name} -" for name in _VALUES]
        bad = int(values.get("nonfinite") or 0)
        yield "    " + "  ".join(numbers) + "  " + (paint.bad(f"{bad} NaN or infinite") if bad else "all finite")


def _place(site: Mapping[str, Any]) -> str:
    file = clean(site.get("file", "?")).rsplit("/", 1)[-1]
    return f"{file}:{clean(site.get('line', '?'))} in {clean(site.get('function', '?'))}"


def _time(stamp: object) -> str:
    """On the clock of whoever reads it."""
    try:
        return f"{datetime.fromisoformat(str(stamp).replace('Z', '+00:00')).astimezone():%H:%M:%S.%f}"[:-3]
    except ValueError:
        return "?"


def _within(told: Mapping[str, Any], paint: Paint) -> str:
    if told.get("raised"):
        return paint.bad("raised")
    seconds = told.get("within_s")
    return f"≤ {duration(seconds)}" if seconds is not None else paint.warn("unfinished") if told.get("pending") else ""


def duration(seconds: float) -> str:
    """
    >>> duration(0.000012), duration(0.0123), duration(2.5), duration(75)
    ('12 µs', '12.3 ms', '2.5 s', '75 s')
    """
    for unit, size, most in (("µs", 1e-6, 1e-3), ("ms", 1e-3, 1.0)):
        if seconds < most:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def counts(items: Iterable[Mapping[str, Any]], missed: int, paint: Paint = PLAIN) -> Iterator[str]:
    """How many calls there were of each operation, and of how many ranks."""
    calls: Counter[str] = Counter()
    ranks: Counter[str] = Counter()
    for item in items:
        calls[clean(item["op"])] += item["calls"]
        ranks[clean(item["op"])] += 1
    if calls:
        yield ""
        yield paint.bold(f"{'calls':>9}  op")
    several = any(number > 1 for number in ranks.values())
    for op, number in calls.most_common():
        yield f"{number:>9,}  {op}" + (f"  ({ranks[op]} rank{'s' if ranks[op] > 1 else ''})" if several else "")
    if missed:
        yield paint.warn(f"{missed:>9,}  not shown")
