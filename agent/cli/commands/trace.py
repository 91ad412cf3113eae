"""`hangwatch trace`: the calls of some ranks as they make them, in place of wrappers that print."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hangwatch.report.calls import call, counts
from hangwatch.report.text import Paint, name_ranks

from ..client import Client, address
from ..errors import ERROR, OK, CliError
from ..terminal import paint, say, tell

MOST_RANKS = 64


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Streams until the time is over, the job is, or Ctrl-C; then counts. Raises CliError."""
    if len(args.rank) > MOST_RANKS:
        raise CliError(f"{len(args.rank)} ranks at once are more than anybody can follow: name at most {MOST_RANKS}")
    shown = _Shown(args=args, colours=paint(env))
    query = {"job": args.job, "rank": args.rank, "op": args.op or None, "group": args.group or None, "seconds": args.seconds}
    with contextlib.closing(Client(address(args.url, args.token, env))) as client:
        try:
            for kind, told in client.stream("trace", values="true" if args.values else None, **query):
                shown.take(kind, told)
        except KeyboardInterrupt:  # that is how it ends where no time was given
            shown.reason = shown.reason or "interrupted"
        finally:
            shown.sum_up()
    return ERROR if len(shown.failed) == len(args.rank) else OK


@dataclass(slots=True, kw_only=True)
class _Shown:
    """What was printed so far."""

    args: argparse.Namespace
    colours: Paint
    ops: Counter[tuple[str, int]] = field(default_factory=Counter)  # by operation and rank
    missed: Counter[int] = field(default_factory=Counter)
    others: list[str] = field(default_factory=list)
    started: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    valued: bool = False
    reason: str = ""

    def take(self, kind: str, told: Mapping[str, Any]) -> None:
        if kind == "call":
            self.ops[str(told.get("op")), int(told.get("rank", -1))] += 1
            self.valued |= bool(told.get("values"))
        elif kind == "start":
            self.started.add(int(told.get("rank", -1)))
            if not self.args.json and len(self.started) == len(self.args.rank):
                until = "" if self.args.seconds else ", until Ctrl-C"
                tell(f"tracing {name_ranks(self.started)}{f', {self.args.op} only' if self.args.op else ''}{until}")
        elif kind == "missed":
            self.missed[int(told.get("rank", -1))] += int(told.get("calls", 0))
        elif kind == "others":
            self.others = [str(op) for op in told.get("ops") or []]
        elif kind == "error":
            self.failed.add(int(told.get("rank", -1)))
            tell(f"rank {told.get('rank')}: {told.get('detail')}")
        elif kind == "end":
            self.reason = str(told.get("reason"))
        for line in self._lines(kind, told):
            print(line, flush=True)

    def _lines(self, kind: str, told: Mapping[str, Any]) -> Iterator[str]:
        if self.args.json and kind in ("call", "missed"):
            yield json.dumps({"type": kind, **told})
        elif kind == "call":
            yield from call(told, self.colours)
        elif kind == "missed":
            number = int(told.get("calls", 0))
            yield self.colours.warn(f"… {number:,} calls not shown of rank {told.get('rank')}: they came faster than they could be read")

    def sum_up(self) -> None:
        """The counts, and what should be known of them."""
        if not self.started and not self.reason:
            return
        items = [{"op": op, "rank": rank, "calls": number} for (op, rank), number in sorted(self.ops.items())]
        if self.args.json:
            print(json.dumps({"type": "counts", "items": items, "missed": self.missed.total(), "ended": self.reason}), flush=True)
        else:
            say(counts(items, self.missed.total(), self.colours))
        if self.reason in ("ended", "closed"):
            tell("the processes have ended" if self.reason == "ended" else "the server stops")
        if not self.ops:
            told = f"; they called {', '.join(self.others)}" if self.others else ""
            wanted = f" of {self.args.op}" if self.args.op else ""
            tell(f"no call{wanted} came from {name_ranks(self.args.rank)}{told}")
        elif self.args.values and not self.valued:
            tell("no values came with these calls: the job must run with HANGWATCH_CHECKS=values, which notes a sample of them")
