"""`hangwatch trace`: prints the calls of some ranks while they make them."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hangwatch.report.calls import format_call, format_call_counts
from hangwatch.report.text import Paint, name_ranks

from ..client import open_client
from ..errors import ERROR, OK, CliError
from ..terminal import detect_paint, print_lines, print_message

MAX_TRACED_RANKS = 64


def run_trace(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Prints calls until the time is up, the job ends, or Ctrl-C; then the counts. Raises CliError."""
    if len(args.rank) > MAX_TRACED_RANKS:
        raise CliError(
            f"{len(args.rank)} ranks are too many to follow: give at most {MAX_TRACED_RANKS}"
        )
    output = _TraceOutput(args=args, colours=detect_paint(env))
    query = {
        "job": args.job,
        "rank": args.rank,
        "op": args.op or None,
        "group": args.group or None,
        "seconds": args.seconds,
        "values": "true" if args.values else None,
    }
    with open_client(args, env) as client:
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
    colours: Paint
    call_counts: Counter[tuple[str, int]] = field(default_factory=Counter)  # by operation and rank
    missed_counts: Counter[int] = field(default_factory=Counter)
    other_ops: list[str] = field(default_factory=list)
    started_ranks: set[int] = field(default_factory=set)
    failed_ranks: set[int] = field(default_factory=set)
    has_values: bool = False
    reason: str = ""

    def handle_event(self, kind: str, event: Mapping[str, Any]) -> None:
        if kind == "call":
            self.call_counts[str(event.get("op")), int(event.get("rank", -1))] += 1
            self.has_values |= bool(event.get("values"))
        elif kind == "start":
            self.started_ranks.add(int(event.get("rank", -1)))
            if not self.args.json and len(self.started_ranks) == len(self.args.rank):
                until = "" if self.args.seconds else ", until Ctrl-C"
                print_message(
                    "tracing"
                    f" {name_ranks(self.started_ranks)}{f', {self.args.op} only' if self.args.op else ''}{until}"
                )
        elif kind == "missed":
            self.missed_counts[int(event.get("rank", -1))] += int(event.get("calls", 0))
        elif kind == "others":
            self.other_ops = [str(op) for op in event.get("ops") or []]
        elif kind == "error":
            self.failed_ranks.add(int(event.get("rank", -1)))
            print_message(f"rank {event.get('rank')}: {event.get('detail')}")
        elif kind == "end":
            self.reason = str(event.get("reason"))
        for line in self._format_event(kind, event):
            print(line, flush=True)

    def _format_event(self, kind: str, event: Mapping[str, Any]) -> Iterator[str]:
        if self.args.json and kind in ("call", "missed"):
            yield json.dumps({"type": kind, **event})
        elif kind == "call":
            yield from format_call(event, self.colours)
        elif kind == "missed":
            number = int(event.get("calls", 0))
            yield self.colours.as_warning(
                f"… {number:,} calls not shown of rank {event.get('rank')}: they came faster than"
                " they could be read"
            )

    def print_summary(self) -> None:
        """Prints the counts, and what a reader should know about them."""
        if not self.started_ranks and not self.reason:
            return
        items = [
            {"op": op, "rank": rank, "calls": number}
            for (op, rank), number in sorted(self.call_counts.items())
        ]
        if self.args.json:
            print(
                json.dumps(
                    {
                        "type": "counts",
                        "items": items,
                        "missed": self.missed_counts.total(),
                        "ended": self.reason,
                    }
                ),
                flush=True,
            )
        else:
            print_lines(format_call_counts(items, self.missed_counts.total(), self.colours))
        if self.reason in ("ended", "closed"):
            print_message(
                "the processes have ended" if self.reason == "ended" else "the server stops"
            )
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
