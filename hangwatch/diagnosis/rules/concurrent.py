"""Two threads of a rank that make calls on one group at the same time: their order is a matter of
chance, and may differ from rank to rank.
"""

from __future__ import annotations

from collections.abc import Iterable

from hangwatch.diagnosis import messages
from hangwatch.diagnosis.context import DiagnosisContext
from hangwatch.model.calls import Call, StreamKind
from hangwatch.model.kinds import KINDS, VerdictKind
from hangwatch.model.verdicts import CallClass, Verdict
from hangwatch.tracking.call_stream import CallStream


def diagnose_concurrent_use(context: DiagnosisContext) -> None:
    """One warning for each group, for all ranks with concurrent calls."""
    for key in context.attempt.concurrent_groups:
        members = context.streams_by_group[key]
        shared = {
            rank: stream
            for rank, stream in members.items()
            if stream.concurrent_calls and stream.kind is StreamKind.COLLECTIVE
        }
        if shared:
            context.verdicts.append(_make_verdict(members, shared))


def _make_verdict(members: dict[int, CallStream], shared: dict[int, CallStream]) -> Verdict:
    """``shared`` are the members whose streams have concurrent calls."""
    culprits = set(shared)
    culprits.update(rank for rank, stream in members.items() if _count_threads(stream) > 1)
    first_rank = min(shared, key=lambda rank: (shared[rank].concurrent_at, rank))
    stream = shared[first_rank]
    calls = stream.concurrent_calls
    newest_call = calls[-1]
    return Verdict(
        kind=VerdictKind.CONCURRENT_USE,
        severity=KINDS[VerdictKind.CONCURRENT_USE].severity,
        culprits=tuple(sorted(culprits)),
        waiting=(),
        group=stream.group,
        seq=newest_call.seq,
        calls=tuple(CallClass(ranks=(first_rank,), call=call) for call in calls),
        began_at=stream.concurrent_at,
        summary=(
            f"two threads of {messages.describe_ranks(tuple(sorted(culprits)))} make calls on one"
            f" group at the same time{_format_lines(calls)}"
            f" ({messages.describe_position(stream.group, newest_call.seq)})"
        ),
        advice=(
            "Give each thread its own process group (new_group), or let one thread make all calls:"
            " the order of calls from two threads is a matter of chance, and if it differs between"
            " ranks, they mismatch or hang."
        ),
        site=newest_call.site,
    )


def _format_lines(calls: Iterable[Call]) -> str:
    """The lines of the calls, as ``, at train.py:7 and train.py:9``."""
    lines = dict.fromkeys(messages.format_line(c.site) for c in calls if c.site is not None)
    return f", at {' and '.join(lines)}" if lines else ""


def _count_threads(stream: CallStream) -> int:
    return len({call.thread for call in stream.calls.values() if call.thread})
