"""From what was added up of a job's calls to what people are shown of it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime

from pydantic import AwareDatetime, Field

from hangwatch.performance import stragglers as skew
from hangwatch.performance.distributions import (
    DurationHistogram,
    compute_bandwidths,
    size_class_min_bytes,
)
from hangwatch.report.text import group_name, name_ranks
from hangwatch.tracking.attempt import Attempt

from ..core import schema
from .aggregation import GroupLedger, JobLedger, Point, Row

MAX_LATE_SHOWN = 16  # ranks of a group


class Durations(schema.ApiModel):
    """How something is distributed. Quantiles are off by 4.4 % at most."""

    count: int
    p50_s: float
    p95_s: float
    max_s: float


class CallStats(schema.ApiModel):
    """Calls of one operation and size class."""

    op: str
    size_from: int = Field(
        description=(
            "bytes: sizes from here to below twice as much; sizes are as nccl-tests count them"
        )
    )
    calls: int = Field(description="by one rank, the mean of those that have told")
    bytes: int = Field(description="likewise, the sizes of these calls added up")
    latency: Durations | None = Field(
        None,
        description=(
            "from a rank's entry to completion; None where nobody told when calls were over"
        ),
    )
    wait: Durations | None = Field(
        None,
        description=(
            "from a rank's entry to that of the last one: at least so long a call must take it"
        ),
    )
    transfer: Durations | None = Field(None, description="from the last entry to completion")
    algbw_gbs: float | None = Field(
        None,
        description="algorithm bandwidth as in nccl-tests, GB/s: mean size / median of `transfer`",
    )
    busbw_gbs: float | None = Field(None, description="bus bandwidth as in nccl-tests, GB/s")


class LateRanks(schema.ApiModel):
    """How often some ranks come last, and by how much."""

    ranks: list[int]
    calls: int = Field(
        description=(
            "in which they came last, by more than a tenth of their usual delay, of those compared"
            " lately"
        )
    )
    share: float = Field(description="these, of all that were compared lately")
    lag_s: float = Field(description="after the others: the median of these calls")
    waited_share: float | None = Field(
        None,
        description=(
            "of the time, in which the others wait for them; null where calls are only queued"
        ),
    )


class Straggler(LateRanks):
    """Whom a group waits for: one rank, or several that are late together."""

    because_of: list[int] | None = Field(
        None,
        description="ranks for which they may be late, having waited for them in another group",
    )
    summary: str


class Arrivals(schema.ApiModel):
    """How far apart the members come to the same calls: when their threads make them, which on
    devices is before they run.
    """

    compared: int
    recent: int = Field(description="the newest of these, by which it is judged who comes last")
    undecided: int = Field(description="of these: the hosts' clocks do not tell who came last")
    uncertainty_s: float = Field(
        description="what is less than this is not taken for a difference; 0 on one host"
    )
    spread: Durations | None = Field(None, description="from the first to the last")
    last: list[LateRanks] = Field(
        [],
        description=(
            "each rank that comes last, alone or with others, the one that is waited for longest"
            " first"
        ),
    )


class PeriodStats(schema.ApiModel):
    """A period of 10 s."""

    at: AwareDatetime
    calls: int = Field(description="by all ranks")
    latency_p50_s: float | None = None
    latency_p95_s: float | None = None
    spread_p50_s: float | None = None
    spread_p95_s: float | None = None


class OperationSeries(schema.ApiModel):
    op: str
    points: list[PeriodStats]


class GroupPerformance(schema.ApiModel):
    """How the calls of one process group perform."""

    job: str
    attempt: int
    group: schema.GroupName
    reported: int = Field(description="members that have told of their calls")
    missed_calls: int = Field(description="by all ranks: too many at once to be read")
    straggler: Straggler | None = None
    calls: list[CallStats]
    arrivals: Arrivals
    series: list[OperationSeries]


RankedGroup = tuple[GroupLedger, "Straggler | None"]


def rank_groups(job: JobLedger) -> list[RankedGroup]:
    """The groups, those first that wait longest for somebody; among others the ones that make most
    calls.
    """
    found = {
        number: (late, group)
        for number, group in enumerate(job.groups.values())
        if (late := group.straggler) is not None
    }
    reasons = skew.find_straggler_causes(
        {number: (late, frozenset(group.group.ranks)) for number, (late, group) in found.items()}
    )
    ranked_groups = [
        (
            group,
            _describe_straggler(found[number][0], group, reasons.get(number))
            if number in found
            else None,
        )
        for number, group in enumerate(job.groups.values())
    ]
    return sorted(ranked_groups, key=_ranking_key)


def _ranking_key(ranked_group: RankedGroup) -> tuple[bool, bool, float, int]:
    group, straggler = ranked_group
    return (
        straggler is None,
        straggler is not None and straggler.because_of is not None,
        -group.straggler.waited_share if straggler and group.straggler else 0.0,
        -sum(row.calls for row in group.rows.values()),
    )


def _describe_straggler(
    late: skew.LatenessStats, group: GroupLedger, because_of: frozenset[int] | None
) -> Straggler:
    summary = skew.format_straggler(
        late, group_name(group.group.name, group.group.desc), group.error, queued=group.queued
    )
    if because_of is not None:
        summary += f"; {name_ranks(because_of)}, waited for elsewhere, may be why"
    because_of_ranks = None if because_of is None else sorted(because_of)
    return Straggler(
        **_describe_late_ranks(late, group.queued).model_dump(),
        because_of=because_of_ranks,
        summary=summary,
    )


def list_stragglers(ranked_groups: Iterable[RankedGroup]) -> list[Straggler]:
    """Those that are late by themselves, each once, the one that is waited for longest first."""
    kept: dict[tuple[int, ...], Straggler] = {}
    for _, straggler in ranked_groups:
        if straggler is not None and straggler.because_of is None:
            kept.setdefault(tuple(straggler.ranks), straggler)
    return list(kept.values())


def describe_group(
    attempt: Attempt, ranked_group: RankedGroup, date: Callable[[float], datetime]
) -> GroupPerformance:
    ledger, straggler = ranked_group
    members = len(ledger.group.ranks)
    return GroupPerformance(
        job=attempt.job,
        attempt=attempt.number,
        group=schema.GroupName(
            name=ledger.group.name,
            desc=ledger.group.desc,
            ranks=list(ledger.group.ranks),
            backend=ledger.group.backend,
        ),
        reported=len(ledger.ranks),
        missed_calls=ledger.missed,
        straggler=straggler,
        calls=list(_describe_calls(ledger, members)),
        arrivals=Arrivals(
            compared=ledger.compared,
            recent=len(ledger.judged),
            undecided=ledger.undecided,
            uncertainty_s=round(ledger.error, 6),
            spread=summarize_durations(ledger.spread),
            last=[
                _describe_late_ranks(late, ledger.queued) for late in ledger.late[:MAX_LATE_SHOWN]
            ],
        ),
        series=[
            OperationSeries(op=op, points=[_describe_period(p, date) for p in series.all()])
            for op, series in ledger.series.items()
        ],
    )


def _describe_calls(ledger: GroupLedger, members: int) -> Iterator[CallStats]:
    reporting_ranks = max(1, len(ledger.ranks))
    for (op, size), row in sorted(
        ledger.rows.items(), key=lambda item: (-item[1].bytes, -item[1].calls, item[0])
    ):
        speed = _compute_bandwidths(op, members, row)
        yield CallStats(
            op=op,
            size_from=size_class_min_bytes(size),
            calls=round(row.calls / reporting_ranks),
            bytes=round(row.bytes / reporting_ranks),
            latency=summarize_durations(row.latency),
            wait=summarize_durations(row.wait),
            transfer=summarize_durations(row.transfer),
            algbw_gbs=None if speed is None else _round_figures(speed[0]),
            busbw_gbs=None if speed is None else _round_figures(speed[1]),
        )


def _compute_bandwidths(op: str, members: int, row: Row) -> tuple[float, float] | None:
    count = row.transfer.total_count
    return (
        compute_bandwidths(op, members, row.transferred / count, row.transfer.quantile(0.5))
        if count
        else None
    )


def _round_figures(value: float) -> float:
    return float(f"{value:.3g}")


def summarize_durations(distribution: DurationHistogram) -> Durations | None:
    p50, p95 = distribution.quantile(0.5), distribution.quantile(0.95)
    if p50 is None or p95 is None:
        return None
    return Durations(
        count=distribution.total_count,
        p50_s=_round_figures(p50),
        p95_s=_round_figures(p95),
        max_s=_round_figures(distribution.longest_us / 1e6),
    )


def _describe_late_ranks(late: skew.LatenessStats, queued: bool) -> LateRanks:
    return LateRanks(
        ranks=sorted(late.ranks),
        calls=late.late_calls,
        share=round(late.share, 3),
        lag_s=_round_figures(late.lag_s),
        waited_share=None if queued else round(late.waited_share, 3),
    )


def _describe_period(point: Point, date: Callable[[float], datetime]) -> PeriodStats:
    latency, spread = point.latency or (None, None), point.spread or (None, None)
    return PeriodStats(
        at=date(point.at),
        calls=point.calls,
        latency_p50_s=latency[0],
        latency_p95_s=latency[1],
        spread_p50_s=spread[0],
        spread_p95_s=spread[1],
    )
