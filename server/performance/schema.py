"""The API's documents about how calls perform."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, AwareDatetime, Field

from ..core.api_model import ApiModel, GroupName

Rounded = Annotated[float, AfterValidator(lambda value: float(f"{value:.3g}"))]  # to 3 digits


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
    group: GroupName
    reported: int = Field(description="members that have reported calls")
    missed_calls: int = Field(
        description="by all ranks: calls that came too fast for the node agent to read"
    )
    straggler: Straggler | None = None
    calls: list[CallStats]
    arrivals: Arrivals
    series: list[OperationSeries]
