"""`hangwatch perf`: how calls perform, and which ranks arrive last."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence

from hangwatch.report.performance import format_bandwidth, format_duration, format_size
from hangwatch.report.text import (
    TERMINAL_COLUMNS,
    Document,
    as_bold,
    as_dim,
    as_warning,
    clean_member,
    clean_text,
    get_parts,
    join_blocks,
    name_group,
    name_ranks,
    truncate_end,
    wrap_text,
)

from ..arguments import add_query_options
from ..client import open_client
from ..errors import OK
from ..terminal import print_message, print_result

_MAX_LATE_RANKS = 4  # lines for each group
_MAX_CALL_LINES = 12  # lines for each group
_BARS = "▁▂▃▄▅▆▇█"
_MAX_PERIODS = 34  # the width of a sparkline


def add_perf_arguments(parser: argparse.ArgumentParser) -> None:
    add_query_options(parser)


def run_perf(args: argparse.Namespace) -> int:
    """Prints the stragglers of each job, then the performance of its groups. Raises CliError."""
    with open_client(args) as client:
        groups = list(client.iter_items("performance", job=args.job))
    blocks = []
    jobs = itertools.groupby(groups, key=lambda group: (group.get("job"), group.get("attempt")))
    for _, job_groups in jobs:
        listed = list(job_groups)
        blocks.append(_format_job(listed))
        blocks += [_format_group(group) for group in listed]
    if groups or args.json:
        print_result(args, {"items": groups, "next": None}, join_blocks(blocks))
    else:
        message = "no calls were reported yet: node agents report them every few seconds"
        print_message(message if args.job else f"{message}, once a job runs")
    return OK


def _format_job(groups: Sequence[Document]) -> Iterator[str]:
    """The job of these groups, and its stragglers that are not late because of other ranks."""
    title = as_bold(truncate_end(clean_text(groups[0].get("job")), TERMINAL_COLUMNS - 16))
    if groups[0].get("attempt"):
        title += f" (attempt {clean_member(groups[0], 'attempt')})"
    yield title
    stragglers = {}  # each straggler once, by its ranks
    for group in reversed(groups):
        straggler = group.get("straggler")
        if straggler and straggler.get("because_of") is None:
            stragglers[str(straggler["ranks"])] = straggler
    for straggler in stragglers.values():
        yield from map(as_warning, wrap_text(straggler.get("summary"), "  "))
    if stragglers:
        return
    if any(group["arrivals"]["compared"] for group in groups):
        yield "  No rank is a straggler."
    else:
        yield "  No call has been compared yet."


def _format_group(group: Document) -> Iterator[str]:
    identity = group["group"]
    title = f"{name_group(identity)}  {name_ranks(identity['ranks'])}"
    yield truncate_end(f"{title} · {clean_member(identity, 'backend', '')}", TERMINAL_COLUMNS)
    straggler = group.get("straggler")
    if straggler and straggler.get("because_of") is not None:
        yield from wrap_text(straggler.get("summary"), "  ")
    yield as_dim("  CALL                      FROM    CALLS     P50     P95 TO LAST      BUSBW")
    calls = get_parts(group, "calls")
    for call in calls[:_MAX_CALL_LINES]:
        op = truncate_end(clean_member(call, "op"), 22)
        size = format_size(call["size_from"]) if call["size_from"] else "-"
        latency = call.get("latency") or {}
        wait = call.get("wait") or {}
        times = ""
        for seconds in (latency.get("p50_s"), latency.get("p95_s"), wait.get("p50_s")):
            time = "-" if seconds is None else format_duration(seconds)
            times += f" {time:>7}"
        bandwidth = "-" if call.get("busbw_gbs") is None else format_bandwidth(call["busbw_gbs"])
        yield f"  {op:22} {size:>7} {call['calls']:>8}{times} {bandwidth:>10}"
    if len(calls) > _MAX_CALL_LINES:
        yield f"  and {len(calls) - _MAX_CALL_LINES} more sizes"
    yield from _format_arrivals(group)
    yield from _format_series(group)


def _format_arrivals(group: Document) -> Iterator[str]:
    arrivals = group["arrivals"]
    spread = arrivals.get("spread")
    if not spread:
        return
    compared = f"{arrivals['compared']} calls compared"
    if arrivals.get("uncertainty_s"):
        compared += f", known to {format_duration(arrivals['uncertainty_s'])}"
    yield from wrap_text(
        f"arrivals apart: p50 {format_duration(spread['p50_s'])}, p95"
        f" {format_duration(spread['p95_s'])}, max {format_duration(spread['max_s'])}"
        f" ({compared})",
        "  ",
    )
    for late in arrivals["last"][:_MAX_LATE_RANKS]:
        line = (
            f"  {name_ranks(late['ranks']):<10} last in {100 * late['share']:3.0f} %,"
            f" {format_duration(late['lag_s'])} after the others"
        )
        if late["waited_share"] is not None:
            line += f", waited for {100 * late['waited_share']:.0f} % of the time"
        yield line


def _format_series(group: Document) -> Iterator[str]:
    """Sparklines of latency and spread over time, if there is more than one value."""
    if not group["arrivals"].get("spread"):
        return
    for series in get_parts(group, "series"):
        op = truncate_end(clean_member(series, "op"), 18)
        for name, key in (("latency", "latency_p95_s"), ("apart", "spread_p95_s")):
            values = [point.get(key) for point in series["points"]][-_MAX_PERIODS:]
            known_values = [value for value in values if value is not None]
            if len(known_values) > 1:
                largest = format_duration(max(known_values))
                yield f"  {op:18} {name + ' p95':11} {draw_sparkline(values)} to {largest}"


def draw_sparkline(values: Sequence[float | None]) -> str:
    """Bars from 0 to the largest value; a blank for None.

    >>> draw_sparkline([0.0, None, 0.5, 1.0])
    '▁ ▅█'
    """
    largest = max((value for value in values if value is not None), default=0.0) or 1.0
    bars = ""
    for value in values:
        bars += " " if value is None else _BARS[min(7, int(8 * value / largest))]
    return bars
