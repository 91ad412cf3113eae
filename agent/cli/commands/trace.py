"""`hangwatch trace`: prints the calls of some ranks while they make them, one line for each, and
then their counts. The lines are made from the API's JSON documents; see
`hangwatch.report.terminal`.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from hangwatch.report.text import (
    Document,
    as_bold,
    as_dim,
    as_error,
    as_warning,
    clean_member,
    clean_text,
    format_line,
    get_parts,
    name_group,
    name_ranks,
    parse_time,
)

from ..arguments import add_query_options, parse_ranks
from ..client import open_client
from ..errors import ERROR, OK, CliError
from ..terminal import print_lines, print_message

MAX_TRACED_RANKS = 64
_MAX_TRACE_S = 86_400


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    add_query_options(parser)
    parser.add_argument(
        "--rank",
        type=parse_ranks,
        required=True,
        metavar="RANKS",
        help="the ranks to trace, such as 0 or 0,3-5",
    )
    parser.add_argument("--op", default="", help="only this operation, such as all_reduce")
    parser.add_argument(
        "--group", default="", help="only this process group, by its name or description"
    )
    parser.add_argument(
        "--values",
        action="store_true",
        help="include tensor statistics, if the job runs with HANGWATCH_CHECKS=values",
    )
    parser.add_argument(
        "--seconds",
        type=_parse_seconds,
        metavar="N",
        help="stop after N seconds (default: at Ctrl-C)",
    )


def _parse_seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= _MAX_TRACE_S:
        raise argparse.ArgumentTypeError(
            f"{text!r} should be a number of seconds above 0, and at most {_MAX_TRACE_S}"
        )
    return value


def run_trace(args: argparse.Namespace) -> int:
    """Prints calls until the time is up, the job ends, or Ctrl-C; then the counts. Raises CliError."""
    if len(args.rank) > MAX_TRACED_RANKS:
        raise CliError(
            f"{len(args.rank)} ranks are too many to follow: give at most {MAX_TRACED_RANKS}"
        )
    output = _TraceOutput(args=args)
    query = {
        "job": args.job,
        "rank": args.rank,
        "op": args.op or None,
        "group": args.group or None,
        "seconds": args.seconds,
        "values": "true" if args.values else None,
    }
    with open_client(args) as client:
        try:
            for kind, event in client.stream_events("trace", **query):
                output.handle_event(kind, event)
        except KeyboardInterrupt:  # the usual end if no time was given
            output.reason = output.reason or "interrupted"
        finally:
            output.print_summary()
    return ERROR if len(output.failed_ranks) == len(args.rank) else OK


@dataclass(slots=True, kw_only=True)
class _TraceOutput:
    """Prints the events of a trace, and counts them for the summary."""

    args: argparse.Namespace
    # The keys are operations and ranks.
    call_counts: Counter[tuple[str, int]] = field(default_factory=Counter)
    missed_count: int = 0
    other_ops: list[str] = field(default_factory=list)
    started_ranks: set[int] = field(default_factory=set)
    failed_ranks: set[int] = field(default_factory=set)
    has_values: bool = False
    reason: str = ""

    def handle_event(self, kind: str, event: Document) -> None:
        if self.args.json and kind in ("call", "missed"):
            print(json.dumps({"type": kind, **event}), flush=True)
        if kind == "call":
            self.call_counts[str(event.get("op")), int(event.get("rank", -1))] += 1
            self.has_values |= bool(event.get("values"))
            if not self.args.json:
                print_lines(format_call(event), flush=True)
        elif kind == "start":
            self.started_ranks.add(int(event.get("rank", -1)))
            if not self.args.json and len(self.started_ranks) == len(self.args.rank):
                operation = f", {self.args.op} only" if self.args.op else ""
                until = "" if self.args.seconds else ", until Ctrl-C"
                print_message(f"tracing {name_ranks(self.started_ranks)}{operation}{until}")
        elif kind == "missed":
            count = int(event.get("calls", 0))
            self.missed_count += count
            if not self.args.json:
                line = (
                    f"… {count:,} calls not shown of rank {event.get('rank')}: they came faster"
                    " than they could be read"
                )
                print_lines([as_warning(line)], flush=True)
        elif kind == "others":
            self.other_ops = [str(op) for op in get_parts(event, "ops")]
        elif kind == "error":
            self.failed_ranks.add(int(event.get("rank", -1)))
            print_message(f"rank {event.get('rank')}: {event.get('detail')}")
        elif kind == "end":
            self.reason = str(event.get("reason"))

    def print_summary(self) -> None:
        """Prints the counts, why the trace ended, and why there are no calls or values."""
        if not self.started_ranks and not self.reason:
            return
        if self.args.json:
            items = [
                {"op": op, "rank": rank, "calls": count}
                for (op, rank), count in sorted(self.call_counts.items())
            ]
            summary = {"items": items, "missed": self.missed_count, "ended": self.reason}
            print(json.dumps({"type": "counts", **summary}), flush=True)
        else:
            print_lines(self._format_counts())
        if self.reason == "ended":
            print_message("the processes have ended")
        elif self.reason == "closed":
            print_message("the server stops")
        if not self.call_counts:
            calls = f"{self.args.op} calls" if self.args.op else "calls"
            message = f"{name_ranks(self.args.rank)} made no {calls}"
            if self.other_ops:
                message += f", only {', '.join(self.other_ops)}"
            print_message(message)
        elif self.args.values and not self.has_values:
            print_message(
                "these calls have no values: the job must run with HANGWATCH_CHECKS=values, which"
                " records a sample of them"
            )

    def _format_counts(self) -> Iterator[str]:
        """The number of calls of each operation, and the number of ranks that made any."""
        call_counts: Counter[str] = Counter()
        rank_counts: Counter[str] = Counter()
        for (op, _), count in sorted(self.call_counts.items()):
            call_counts[clean_text(op)] += count
            rank_counts[clean_text(op)] += 1
        if call_counts:
            yield ""
            yield as_bold("    calls  op")
        has_several_ranks = any(count > 1 for count in rank_counts.values())
        for op, call_count in call_counts.most_common():
            line = f"{call_count:>9,}  {op}"
            if has_several_ranks:
                ranks = "1 rank" if rank_counts[op] == 1 else f"{rank_counts[op]} ranks"
                line += f"  ({ranks})"
            yield line
        if self.missed_count:
            yield as_warning(f"{self.missed_count:>9,}  not shown")


def format_call(document: Document) -> Iterator[str]:
    """A line such as ``12:00:01.123  rank 0  all_reduce [64] float32 sum  default_pg 812
    train.py:41 in step  ≤ 1.2 ms``, and a second one such as ``mean 0.5  min 0  max 1  norm 8  all
    finite`` if the call has values.
    """
    try:  # the time of day in the reader's time zone, with milliseconds
        time = f"{parse_time(str(document.get('at'))).astimezone():%H:%M:%S.%f}"[:-3]
    except ValueError:
        time = "?"
    site, within_s = document.get("site"), document.get("within_s")
    latency = as_warning("unfinished") if document.get("pending") else ""
    if document.get("raised"):
        latency = as_error("raised")
    elif within_s is not None:
        latency = f"≤ {format_duration(within_s)}"
    columns = (
        time,
        f"rank {clean_member(document, 'rank')}",
        _format_arguments(document),
        f"{name_group(document.get('group') or {})} {clean_member(document, 'seq')}",
        as_dim(f"{format_line(site)} in {clean_member(site, 'function')}") if site else "",
        latency,
    )
    yield "  ".join(column for column in columns if column)
    if values := document.get("values"):
        parts = []
        for name in ("mean", "min", "max", "norm"):
            number = values.get(name)
            parts.append(f"{name} -" if number is None else f"{name} {number:.6g}")
        nonfinite_count = int(values.get("nonfinite") or 0)
        if nonfinite_count:
            parts.append(as_error(f"{nonfinite_count} NaN or infinite"))
        else:
            parts.append("all finite")
        yield f"    {'  '.join(parts)}"


def _format_arguments(document: Document) -> str:
    """``all_reduce [64] float32 sum``."""
    parts = [as_bold(clean_member(document, "op"))]
    for shape in get_parts(document, "shapes"):
        parts.append(f"[{', '.join(map(clean_text, shape))}]")
    for key in ("dtype", "reduce_op"):
        parts.append(clean_member(document, key, ""))
    for key in ("root", "peer"):
        if document.get(key) is not None:
            parts.append(f"{key} {clean_member(document, key)}")
    if document.get("async"):
        parts.append("async")
    return " ".join(part for part in parts if part)


def format_duration(seconds: float) -> str:
    """
    >>> format_duration(0.000012), format_duration(0.0123), format_duration(2.5), format_duration(75)
    ('12 µs', '12.3 ms', '2.5 s', '75 s')
    """
    if seconds < 1e-3:
        return f"{seconds / 1e-6:.3g} µs"
    if seconds < 1:
        return f"{seconds / 1e-3:.3g} ms"
    return f"{seconds:.3g} s"
