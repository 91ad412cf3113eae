"""Two threads of a rank that make calls on one group at the same time: which comes first is chance,
and another on every rank.
"""

from __future__ import annotations

from hangwatch.diagnosis import messages
from hangwatch.diagnosis.context import DiagnosisContext
from hangwatch.model.calls import StreamKind
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.verdicts import CallClass, Verdict
from hangwatch.tracking.call_stream import CallStream


def diagnose_concurrent_use(context: DiagnosisContext) -> None:
    """One warning a group, for all ranks that did so."""
    for key in context.attempt.concurrent_groups:
        members = context.streams_by_group[key]
        shared = {
            rank: s
            for rank, s in members.items()
            if s.concurrent_calls and s.kind is StreamKind.COLLECTIVE
        }
        if not shared:
            continue
        first = min(shared, key=lambda rank: (shared[rank].concurrent_at, rank))
        group, calls, since = (
            shared[first].group,
            shared[first].concurrent_calls,
            shared[first].concurrent_at,
        )
        culprits = tuple(
            sorted(
                {*shared, *(rank for rank, other in members.items() if _count_threads(other) > 1)}
            )
        )
        lines = " and ".join(
            dict.fromkeys(
                f"{c.site.file.rpartition('/')[2]}:{c.site.line}"
                for c in calls
                if c.site is not None
            )
        )
        context.verdicts.append(
            Verdict(
                kind=VerdictKind.CONCURRENT_USE,
                severity=Severity.WARNING,
                culprits=culprits,
                waiting=(),
                group=group,
                seq=calls[-1].seq,
                calls=tuple(CallClass(ranks=(first,), call=call) for call in calls),
                began_at=since,
                summary=(
                    f"two threads of {messages.describe_ranks(culprits)} make calls on one group at"
                    f" the same time{f', at {lines}' if lines else ''}"
                    f" ({messages.describe_position(group, calls[-1].seq)})"
                ),
                advice=(
                    "Give each thread a process group of its own (new_group), or let one thread"
                    " make all calls: which comes first is chance, and where that differs between"
                    " ranks they mismatch or hang."
                ),
                site=calls[-1].site,
            )
        )


def _count_threads(stream: CallStream) -> int:
    return len({call.thread for call in stream.calls.values() if call.thread})
