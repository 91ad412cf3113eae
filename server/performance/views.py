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

LATE_SHOWN = 16  # ranks of a group


class Durations(schema.Model):
    """How something is distributed. Quantiles are off by 4.4 % at most."""

    count: int
    p50_s: float
    p95_s: float
    max_s: float


class Calls(schema.Model):
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


class Late(schema.Model):
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


class Straggler(Late):
    """Whom a group waits for: one rank, or several that are late together."""

    because_of: list[int] | None = Field(
        None,
        description="ranks for which they may be late, having waited for them in another group",
    )
    summary: str


class Arrivals(schema.Model):
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
    last: list[Late] = Field(
        [],
        description=(
            "each rank that comes last, alone or with others, the one that is waited for longest"
            " first"
        ),
    )


class Course(schema.Model):
    """A period of 10 s."""

    at: AwareDatetime
    calls: int = Field(description="by all ranks")
    latency_p50_s: float | None = None
    latency_p95_s: float | None = None
    spread_p50_s: float | None = None
    spread_p95_s: float | None = None


class Series(schema.Model):
    op: str
    points: list[Course]


class Group(schema.Model):
    """How the calls of one process group perform."""

    job: str
    attempt: int
    group: schema.GroupName
    reported: int = Field(description="members that have told of their calls")
    missed_calls: int = Field(description="by all ranks: too many at once to be read")
    straggler: Straggler | None = None
    calls: list[Calls]
    arrivals: Arrivals
    series: list[Series]


Standing = tuple[GroupLedger, "Straggler | None"]


def standings(job: JobLedger) -> list[Standing]:
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
    told = [
        (
            group,
            _straggler(found[number][0], group, reasons.get(number)) if number in found else None,
        )
        for number, group in enumerate(job.groups.values())
    ]
    return sorted(told, key=_order)


def _order(standing: Standing) -> tuple[bool, bool, float, int]:
    group, straggler = standing
    return (
        straggler is None,
        straggler is not None and straggler.because_of is not None,
        -group.straggler.waited_share if straggler and group.straggler else 0.0,
        -sum(row.calls for row in group.rows.values()),
    )


def _straggler(
    late: skew.LatenessStats, group: GroupLedger, because_of: frozenset[int] | None
) -> Straggler:
    summary = skew.format_straggler(
        late, group_name(group.group.name, group.group.desc), group.error, queued=group.queued
    )
    if because_of is not None:
        summary += f"; {name_ranks(because_of)}, waited for elsewhere, may be why"
    told = None if because_of is None else sorted(because_of)
    return Straggler(**_late(late, group.queued).model_dump(), because_of=told, summary=summary)


def stragglers(found: Iterable[Standing]) -> list[Straggler]:
    """Those that are late by themselves, each once, the one that is waited for longest first."""
    kept: dict[tuple[int, ...], Straggler] = {}
    for _, straggler in found:
        if straggler is not None and straggler.because_of is None:
            kept.setdefault(tuple(straggler.ranks), straggler)
    return list(kept.values())


def group(attempt: Attempt, standing: Standing, date: Callable[[float], datetime]) -> Group:
    its, straggler = standing
    members = len(its.group.ranks)
    return Group(
        job=attempt.job,
        attempt=attempt.number,
        group=schema.GroupName(
            name=its.group.name,
            desc=its.group.desc,
            ranks=list(its.group.ranks),
            backend=its.group.backend,
        ),
        reported=len(its.ranks),
        missed_calls=its.missed,
        straggler=straggler,
        calls=list(_calls(its, members)),
        arrivals=Arrivals(
            compared=its.compared,
            recent=len(its.judged),
            undecided=its.undecided,
            uncertainty_s=round(its.error, 6),
            spread=durations(its.spread),
            last=[_late(late, its.queued) for late in its.late[:LATE_SHOWN]],
        ),
        series=[
            Series(op=op, points=[_course(p, date) for p in series.all()])
            for op, series in its.series.items()
        ],
    )


def _calls(its: GroupLedger, members: int) -> Iterator[Calls]:
    told = max(1, len(its.ranks))
    for (op, size), row in sorted(
        its.rows.items(), key=lambda item: (-item[1].bytes, -item[1].calls, item[0])
    ):
        speed = _bandwidths(op, members, row)
        yield Calls(
            op=op,
            size_from=size_class_min_bytes(size),
            calls=round(row.calls / told),
            bytes=round(row.bytes / told),
            latency=durations(row.latency),
            wait=durations(row.wait),
            transfer=durations(row.transfer),
            algbw_gbs=None if speed is None else _figures(speed[0]),
            busbw_gbs=None if speed is None else _figures(speed[1]),
        )


def _bandwidths(op: str, members: int, row: Row) -> tuple[float, float] | None:
    count = row.transfer.total_count
    return (
        compute_bandwidths(op, members, row.transferred / count, row.transfer.quantile(0.5))
        if count
        else None
    )


def _figures(value: float) -> float:
    return float(f"{value:.3g}")


def durations(told: DurationHistogram) -> Durations | None:
    p50, p95 = told.quantile(0.5), told.quantile(0.95)
    if p50 is None or p95 is None:
        return None
    return Durations(
        count=told.total_count,
        p50_s=_figures(p50),
        p95_s=_figures(p95),
        max_s=_figures(told.longest_us / 1e6),
    )


def _late(late: skew.LatenessStats, queued: bool) -> Late:
    return Late(
        ranks=sorted(late.ranks),
        calls=late.late_calls,
        share=round(late.share, 3),
        lag_s=_figures(late.lag_s),
        waited_share=None if queued else round(late.waited_share, 3),
    )


def _course(point: Point, date: Callable[[float], datetime]) -> Course:
    latency, spread = point.latency or (None, None), point.spread or (None, None)
    return Course(
        at=date(point.at),
        calls=point.calls,
        latency_p50_s=latency[0],
        latency_p95_s=latency[1],
        spread_p50_s=spread[0],
        spread_p95_s=spread[1],
    )
