"""`hangwatch perf`: how calls perform, and who comes last. `lines` is pure."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from hangwatch.performance.distributions import format_bandwidth, format_size
from hangwatch.performance.stragglers import format_duration
from hangwatch.report.sites import Document
from hangwatch.report.text import (
    TERMINAL_COLUMNS,
    Paint,
    clean_text,
    group_name,
    name_ranks,
    truncate_end,
    wrap_text,
)

from ..client import open_client
from ..errors import OK
from ..terminal import detect_paint, print_json, print_lines, print_message

_MAX_LATE_RANKS = 4  # ranks of a group that are named
_MAX_CALL_LINES = 12  # lines of a group
_BARS = "▁▂▃▄▅▆▇█"
_MAX_PERIODS = 34  # periods


def run_perf(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Raises CliError."""
    with open_client(args, env) as client:
        found = list(client.iter_items("performance", job=args.job))
        if args.json:
            print_json({"items": found, "next": None})
        elif found:
            print_lines(format_performance(found, detect_paint(env)))
        else:
            print_message(
                "no calls were told of yet: node agents do so every few seconds"
                + ("" if args.job else ", once a job runs")
            )
    return OK


def format_performance(documents: Sequence[Document], paint: Paint) -> Iterator[str]:
    """Each job: its stragglers, then its groups, those that wait for somebody first."""
    jobs = itertools.groupby(documents, key=lambda item: (item.get("job"), item.get("attempt")))
    for number, ((job, attempt), its) in enumerate(jobs):
        groups = list(its)
        if number:
            yield ""
        yield paint.bold(truncate_end(clean_text(job), TERMINAL_COLUMNS - 16)) + (
            f" (attempt {clean_text(attempt)})" if attempt else ""
        )
        named = [s for g in groups if (s := g.get("straggler")) and s.get("because_of") is None]
        for straggler in {str(s["ranks"]): s for s in reversed(named)}.values():
            yield from map(paint.as_warning, wrap_text(straggler.get("summary"), "  "))
        if not named:
            yield (
                "  No rank is a straggler."
                if any(g["arrivals"]["compared"] for g in groups)
                else "  No call has been compared yet."
            )
        for group in groups:
            yield ""
            yield from _format_group(group, paint)


def _format_group(group: Document, paint: Paint) -> Iterator[str]:
    its = group["group"]
    about = f"{name_ranks(its['ranks'])} · {clean_text(its.get('backend', ''))}"
    yield truncate_end(f"{group_name(its['name'], its.get('desc'))}  {about}", TERMINAL_COLUMNS)
    late = group.get("straggler")
    if late and late.get("because_of") is not None:
        yield from wrap_text(late.get("summary"), "  ")
    yield paint.dim(
        f"  {'CALL':22} {'FROM':>7} {'CALLS':>8} {'P50':>7} {'P95':>7} {'TO LAST':>7} {'BUSBW':>10}"
    )
    calls = group.get("calls") or []
    for call in calls[:_MAX_CALL_LINES]:
        latency, waited = call.get("latency") or {}, call.get("wait") or {}
        times = (latency.get("p50_s"), latency.get("p95_s"), waited.get("p50_s"))
        yield (
            f"  {truncate_end(clean_text(call['op']), 22):22}"
            f" {format_size(call['size_from']) if call['size_from'] else '-':>7}"
            f" {call['calls']:>8} "
            + " ".join(f"{'-' if t is None else format_duration(t):>7}" for t in times)
            + f" {'-' if call.get('busbw_gbs') is None else format_bandwidth(call['busbw_gbs']):>10}"
        )
    if len(calls) > _MAX_CALL_LINES:
        yield f"  and {len(calls) - _MAX_CALL_LINES} more sizes"
    yield from _format_arrivals(group, paint)


def _format_arrivals(group: Document, paint: Paint) -> Iterator[str]:
    arrivals = group["arrivals"]
    spread = arrivals.get("spread")
    if not spread:
        return
    unsure = (
        f", known to {format_duration(arrivals['uncertainty_s'])}"
        if arrivals.get("uncertainty_s")
        else ""
    )
    yield from wrap_text(
        f"arrivals apart: p50 {format_duration(spread['p50_s'])}, p95"
        f" {format_duration(spread['p95_s'])}, max {format_duration(spread['max_s'])}"
        f" ({arrivals['compared']} calls compared{unsure})",
        "  ",
    )
    for late in arrivals["last"][:_MAX_LATE_RANKS]:
        yield (
            f"  {name_ranks(late['ranks']):<10} last in {100 * late['share']:3.0f} %,"
            f" {format_duration(late['lag_s'])} after the others"
            + (
                ""
                if late["waited_share"] is None
                else f", waited for {100 * late['waited_share']:.0f} % of the time"
            )
        )
    for series in group.get("series") or []:
        for name, key in (("latency", "latency_p95_s"), ("apart", "spread_p95_s")):
            values = [point.get(key) for point in series["points"]][-_MAX_PERIODS:]
            if sum(value is not None for value in values) > 1:
                most = max(value for value in values if value is not None)
                yield (
                    f"  {truncate_end(clean_text(series['op']), 18):18} {name + ' p95':11}"
                    f" {draw_sparkline(values)} to {format_duration(most)}"
                )


def draw_sparkline(values: Iterable[float | None]) -> str:
    """From 0 to the largest; a blank where nothing is known.

    >>> sparkline([0.0, None, 0.5, 1.0])
    '▁ ▅█'
    """
    known = list(values)
    most = max((value for value in known if value is not None), default=0.0) or 1.0
    return "".join(
        " " if value is None else _BARS[min(7, int(8 * value / most))] for value in known
    )
