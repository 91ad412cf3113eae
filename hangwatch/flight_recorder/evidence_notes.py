"""Notes for the user on what Flight Recorder dumps cannot show: missing, empty and old dumps, and
calls whose state is unknown. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hangwatch.diagnosis import messages
from hangwatch.model.ranks import format_ranks
from hangwatch.report.text import format_age
from hangwatch.tracking.attempt import Attempt

from .calls import ARRIVALS_ONLY_BACKEND
from .dumps import FlightDump

_STALE_DUMP_S = 600.0  # seconds between the calls of two dumps


def describe_gaps(dumps: Sequence[FlightDump], missing_ranks: Sequence[int]) -> Iterable[str]:
    """What the dumps do not contain, one sentence for each gap."""
    if missing_ranks:
        plural = "s" if len(missing_ranks) > 1 else ""
        yield (
            f"no dump of rank{plural} {format_ranks(missing_ranks)}: that is missing evidence, not"
            " a sign of death"
        )
    if any(ARRIVALS_ONLY_BACKEND in dump.backends.values() for dump in dumps):
        yield (
            "gloo's recorder records neither point-to-point calls nor the completion of calls: only"
            " which rank entered which collective is known"
        )
    yield from _describe_stale_dumps(dumps)
    empty = [dump.rank for dump in dumps if not dump.group_instances]
    if empty:
        noun, verb = ("dumps", "contain") if len(empty) > 1 else ("dump", "contains")
        plural = "s" if len(empty) > 1 else ""
        yield f"the {noun} of rank{plural} {format_ranks(empty)} {verb} no calls"


def _describe_stale_dumps(dumps: Sequence[FlightDump]) -> Iterable[str]:
    """Dumps whose calls were all made long before those of the others: they may be left over from
    an earlier run.
    """
    dated = [dump for dump in dumps if dump.call_time_range[0]]
    dated.sort(key=lambda dump: dump.call_time_range[1])
    newer_begin = float("inf")
    for count in range(len(dated) - 1, 0, -1):
        newer_begin = min(newer_begin, dated[count].call_time_range[0])
        gap_s = newer_begin - dated[count - 1].call_time_range[1]
        if gap_s > _STALE_DUMP_S:
            ranks = tuple(sorted(dump.rank for dump in dated[:count]))
            noun = "dumps" if count > 1 else "dump"
            yield (
                f"all calls in the {noun} of {messages.describe_ranks(ranks)} were made at least"
                f" {format_age(gap_s)} before the calls of the other ranks: unless a clock is"
                f" wrong, the {noun} came from an earlier run and should be left out"
            )
            return


def describe_unexplained_calls(attempt: Attempt, may_be_running: bool) -> Iterable[str]:
    """Calls that may be unfinished although, as far as is known, no member is missing."""
    ranks_by_call: dict[str, list[int]] = {}
    for streams in attempt.streams_by_group.values():
        for rank, stream in streams.items():
            if stream.is_pending:
                position = messages.describe_position(stream.group, stream.entered)
                ranks_by_call.setdefault(f"{stream.op} ({position})", []).append(rank)
    if may_be_running:
        reason = (
            "the dumps were written within a second of it, so the job may have been running: write"
            " the dumps while the job hangs"
        )
    else:
        reason = "the dumps do not show why"
    for call, ranks in sorted(ranks_by_call.items()):
        yield f"{messages.describe_ranks(tuple(ranks))} may still be in {call}; {reason}"
