"""The API's documents about the performance of calls, made from the totals of a job. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from pydantic import AfterValidator, AwareDatetime, Field

from hangwatch.model.groups import Group
from hangwatch.performance import distributions, stragglers
from hangwatch.report.performance import format_straggler
from hangwatch.report.text import group_name
from hangwatch.tracking.attempt import Attempt

from ..core.schema import ApiModel, AsDocument
from .totals import GroupTotals, JobTotals, compute_p50_p95

MAX_LATE_RANKS_SHOWN = 16  # ranks of a group

DateConverter = Callable[[float], datetime]  # the argument is monotonic
Rounded = Annotated[float, AfterValidator(lambda value: float(f"{value:.3g}"))]  # three digits


@dataclass(frozen=True, slots=True)
class RankedGroup:
    """A group, and the straggler that it waits for, if any."""

    totals: GroupTotals
    straggler: Straggler | None


def rank_groups(job: JobTotals) -> list[RankedGroup]:
    """The groups of a job: those with a straggler of their own first, then by waiting time and by
    calls.
    """
    groups = list(job.groups.values())
    late_by_group = {
        number: (group.arrivals.straggler, frozenset(group.group.ranks))
        for number, group in enumerate(groups)
        if group.arrivals.straggler is not None
    }
    causes = stragglers.find_straggler_causes(late_by_group)
    ranked = []
    for number, totals in enumerate(groups):
        late = totals.arrivals.straggler
        straggler = None
        because_of = causes.get(number)
        waited_share = 0.0
        if late is not None:
            waited_share = late.waited_share
            summary = format_straggler(
                late.ranks,
                group_name(totals.group.name, totals.group.desc),
                share=late.share,
                lag_s=late.lag_s,
                error_s=totals.arrivals.error_s,
                waited_share=None if totals.queued else waited_share,
                because_of=because_of,
            )
            straggler = Straggler(
                **_describe_late_ranks(late, totals.queued).model_dump(),
                because_of=None if because_of is None else sorted(because_of),
                summary=summary,
            )
        calls = sum(row.calls for row in totals.size_classes.values())
        order = (late is None, because_of is not None, -waited_share, -calls)
        ranked.append((order, RankedGroup(totals, straggler)))
    ranked.sort(key=lambda entry: entry[0])
    return [group for _, group in ranked]


def list_stragglers(ranked_groups: Iterable[RankedGroup]) -> list[Straggler]:
    """The stragglers that are late by themselves, each once; the one most waited for comes first."""
    stragglers: dict[tuple[int, ...], Straggler] = {}
    for ranked in ranked_groups:
        straggler = ranked.straggler
        if straggler is not None and straggler.because_of is None:
            stragglers.setdefault(tuple(straggler.ranks), straggler)
    return list(stragglers.values())


def describe_group_performance(
    attempt: Attempt, ranked: RankedGroup, to_date: DateConverter
) -> GroupPerformance:
    totals = ranked.totals
    arrivals = totals.arrivals
    series = []
    for op, history in totals.histories.items():
        points = []
        for point in history.list_points():
            latency_p50_s, latency_p95_s = point.latency_p50_p95 or (None, None)
            spread_p50_s, spread_p95_s = point.spread_p50_p95 or (None, None)
            stats = PeriodStats(
                at=to_date(point.started_at),
                calls=point.calls,
                latency_p50_s=latency_p50_s,
                latency_p95_s=latency_p95_s,
                spread_p50_s=spread_p50_s,
                spread_p95_s=spread_p95_s,
            )
            points.append(stats)
        series.append(OperationSeries(op=op, points=points))
    return GroupPerformance(
        job=attempt.job,
        attempt=attempt.number,
        group=totals.group,
        reported=len(totals.reporting_ranks),
        missed_calls=totals.missed_calls,
        straggler=ranked.straggler,
        calls=list(_iter_call_stats(totals)),
        arrivals=Arrivals(
            compared=arrivals.compared_calls,
            recent=len(arrivals.recent_skews),
            undecided=arrivals.undecided_calls,
            uncertainty_s=round(arrivals.error_s, 6),
            spread=_summarize_durations(arrivals.spread),
            last=[
                _describe_late_ranks(late, totals.queued)
                for late in arrivals.latecomers[:MAX_LATE_RANKS_SHOWN]
            ],
        ),
        series=series,
    )


def _iter_call_stats(totals: GroupTotals) -> Iterator[CallStats]:
    """One entry for each operation and size class, the one that moves the most bytes first."""
    members = len(totals.group.ranks)
    reporting_ranks = max(1, len(totals.reporting_ranks))
    ordered = sorted(
        totals.size_classes.items(), key=lambda item: (-item[1].bytes, -item[1].calls, item[0])
    )
    for (op, size_class), row in ordered:
        mean_bytes = row.transferred_bytes / max(1, row.transfer.total_count)
        median_s = row.transfer.quantile(0.5)
        bandwidths = distributions.compute_bandwidths(op, members, mean_bytes, median_s)
        algorithm_gbs, bus_gbs = bandwidths or (None, None)
        yield CallStats(
            op=op,
            size_from=distributions.size_class_min_bytes(size_class),
            calls=round(row.calls / reporting_ranks),
            bytes=round(row.bytes / reporting_ranks),
            latency=_summarize_durations(row.latency),
            wait=_summarize_durations(row.wait),
            transfer=_summarize_durations(row.transfer),
            algbw_gbs=algorithm_gbs,
            busbw_gbs=bus_gbs,
        )


def _summarize_durations(durations: distributions.DurationHistogram) -> Durations | None:
    """The document of a histogram; None for an empty one."""
    quantiles = compute_p50_p95(durations)
    if quantiles is None:
        return None
    p50_s, p95_s = quantiles
    max_s = durations.longest_us / 1e6
    return Durations(count=durations.total_count, p50_s=p50_s, p95_s=p95_s, max_s=max_s)


def _describe_late_ranks(late: stragglers.LatenessStats, queued: bool) -> LateRanks:
    return LateRanks(
        ranks=sorted(late.ranks),
        calls=late.late_calls,
        share=round(late.share, 3),
        lag_s=late.lag_s,
        waited_share=None if queued else round(late.waited_share, 3),
    )


class Durations(ApiModel):
    """A distribution of durations. The error of a quantile is at most 4.4 %."""

    count: int
    p50_s: Rounded
    p95_s: Rounded
    max_s: Rounded


class CallStats(ApiModel):
    """The calls of one operation and size class."""

    op: str
    size_from: int = Field(
        description=(
            "smallest size of the class in bytes; the largest is just below twice as much. Sizes are"
            " as nccl-tests define them"
        )
    )
    calls: int = Field(description="calls per rank, the mean over the reporting ranks")
    bytes: int = Field(description="the sizes of these calls added up")
    latency: Durations | None = Field(
        None,
        description="from a rank's entry to completion; null if completion times are unknown",
    )
    wait: Durations | None = Field(
        None,
        description="from a rank's entry to the last rank's entry: a lower bound on the latency",
    )
    transfer: Durations | None = Field(None, description="from the last rank's entry to completion")
    algbw_gbs: Rounded | None = Field(
        None,
        description="algorithm bandwidth as in nccl-tests, GB/s: mean size / median of `transfer`",
    )
    busbw_gbs: Rounded | None = Field(None, description="bus bandwidth as in nccl-tests, GB/s")


class LateRanks(ApiModel):
    """How often some ranks arrive last, and by how much."""

    ranks: list[int]
    calls: int = Field(
        description=(
            "recently compared calls at which they arrived last, by more than a tenth of their usual"
            " delay"
        )
    )
    share: float = Field(description="share of all recently compared calls")
    lag_s: Rounded = Field(description="delay after the other ranks: the median over these calls")
    waited_share: float | None = Field(
        None,
        description=(
            "share of the time during which the other ranks wait for them; null where calls are"
            " queued on a device"
        ),
    )


class Straggler(LateRanks):
    """The rank, or several that are late together, that a group repeatedly waits for."""

    because_of: list[int] | None = Field(
        None,
        description=(
            "ranks that they wait for in another group, which may be the reason why they are late"
        ),
    )
    summary: str


class Arrivals(ApiModel):
    """How far apart the members arrive at the same calls. A rank arrives when its thread makes the
    call; a device may run it later.
    """

    compared: int
    recent: int = Field(description="the newest of these, from which latecomers are determined")
    undecided: int = Field(
        description="compared calls of which the hosts' clocks do not show which rank came last"
    )
    uncertainty_s: float = Field(
        description="smaller differences than this are ignored; 0 on one host"
    )
    spread: Durations | None = Field(None, description="from the first to the last arrival")
    last: list[LateRanks] = Field(
        [],
        description=(
            "each rank that arrives last, alone or with others; the one that causes the most waiting"
            " comes first"
        ),
    )


class PeriodStats(ApiModel):
    """A period of 10 s."""

    at: AwareDatetime
    calls: int = Field(description="by all ranks")
    latency_p50_s: float | None = None
    latency_p95_s: float | None = None
    spread_p50_s: float | None = None
    spread_p95_s: float | None = None


class OperationSeries(ApiModel):
    op: str
    points: list[PeriodStats]


class GroupPerformance(ApiModel):
    """How the calls of one process group perform."""

    job: str
    attempt: int
    group: Annotated[Group, AsDocument()]
    reported: int = Field(description="members that have reported calls")
    missed_calls: int = Field(
        description="by all ranks: calls that came too fast for the node agent to read"
    )
    straggler: Straggler | None = None
    calls: list[CallStats]
    arrivals: Arrivals
    series: list[OperationSeries]
