"""The server's performance totals are right, and bounded whatever is sent."""

from __future__ import annotations

import random
from datetime import datetime, timezone

from hangwatch.model.calls import StreamKind
from hangwatch.model.groups import Group, OutsideMember
from hangwatch.model.ranks import AttemptKey
from hangwatch.protocol import heartbeat
from hangwatch.server.performance import views
from hangwatch.server.performance.totals import (
    MAX_COMPARED_CALLS,
    MAX_GROUPS,
    MAX_PERIODS,
    MAX_SIZE_CLASS_ROWS,
    OTHER_OPS,
    GroupTotals,
    PerformanceTotals,
)
from hangwatch.server.performance.views import GroupPerformance
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.fleet import Fleet


class PerformanceJob:
    """Ranks on hosts whose clocks differ, and their reports."""

    def __init__(
        self, ranks: int = 4, per_host: int = 2, uncertain: float = 0.001, device: bool = False
    ) -> None:
        self.totals, self.fleet, self.now = PerformanceTotals(), Fleet(), 1000.0
        self.ranks, self.per_host, self.clock_uncertainty_s, self.device = (
            ranks,
            per_host,
            uncertain,
            device,
        )
        self.numbers: dict[int, int] = {}
        for host in range(-(-ranks // per_host)):
            self.send_heartbeat(host, first=True)

    def clock_offset(self, host: int) -> float:
        """The host's clock minus the server's."""
        return 5000.0 * (host + 1)

    def send_heartbeat(
        self, host: int, *parts: heartbeat.StreamPerformance, first: bool = False, number: int = 0
    ) -> None:
        self.numbers[host] = self.numbers.get(host, 0) + 1
        processes = []
        for rank in (
            range(host * self.per_host, min(self.ranks, (host + 1) * self.per_host))
            if first
            else ()
        ):
            who = heartbeat.ProcessIdentity(
                job="j", rank=rank, world_size=self.ranks, pid=rank, start_ticks=1
            )
            group = heartbeat.StreamIdentity(
                kind=StreamKind.COLLECTIVE, name="0", desc="dp_1", ranks=f"0-{self.ranks - 1}"
            )
            stream = heartbeat.StreamUpdate(
                uid=1, identity=group, entered=1, completed=None if self.device else 1
            )
            processes.append(
                heartbeat.ProcessUpdate(key=f"{rank}-1", identity=who, streams=(stream,))
            )
        middle = self.clock_offset(host)
        report = heartbeat.PerformanceReport(
            number=number or self.numbers[host],
            clock=(middle - self.clock_uncertainty_s, middle + self.clock_uncertainty_s),
            streams=parts,
        )
        beat = heartbeat.Heartbeat(
            host=f"n{host}",
            agent=f"a{host}",
            number=self.numbers[host],
            processes=tuple(processes),
            performance=report,
        )
        self.fleet.apply_heartbeat(beat, self.now)
        self.totals.apply_heartbeat(beat, self.fleet, self.now)

    def report_calls(
        self, seq: int, at: dict[int, float], took_us: int = -1, op: str = "all_reduce"
    ) -> None:
        """Each rank reports one call, which it entered at ``at`` seconds."""
        for rank, moment in at.items():
            host = rank // self.per_host
            latency = ((81, 1),) if took_us > 0 else ()
            total = heartbeat.CallTotals(
                op=op, size=11, calls=1, bytes=1024, latency=latency, longest_us=max(0, took_us)
            )
            sample = (
                seq,
                round((moment - self.clock_offset(host)) * 1e6) + 10**12,
                200_000,
                took_us,
                op,
                11,
                1024,
            )
            self.send_heartbeat(
                host,
                heartbeat.StreamPerformance(
                    key=f"{rank}-1", uid=1, totals=(total,), samples=(sample,)
                ),
            )

    @property
    def latest_attempt(self) -> Attempt:
        return self.fleet.attempts[AttemptKey("j", 0)]

    @property
    def group_view(self) -> GroupPerformance:
        (ranked,) = views.rank_groups(self.totals.get_job(self.latest_attempt))
        return views.describe_group_performance(
            self.latest_attempt, ranked, lambda at: datetime.fromtimestamp(at, timezone.utc)
        )


def test_members_that_are_no_ranks_of_the_attempt_are_named_apart() -> None:
    outside = OutsideMember.create(-2, "pid 7 on node9")
    group = Group(name="x", desc="undefined", ranks=(0, outside), foreign="store/x")
    view = views.describe_group_performance(
        PerformanceJob().latest_attempt,
        views.RankedGroup(GroupTotals(group=group), None),
        lambda at: datetime.fromtimestamp(at, timezone.utc),
    )
    assert view.model_dump(mode="json")["group"] == {
        "name": "x",
        "desc": "undefined",
        "ranks": [0],
        "backend": "",
        "outside": ["pid 7 on node9"],
    }


def test_straggler_on_hosts_with_different_clocks() -> None:
    job = PerformanceJob()
    for n in range(80):
        job.now += 0.2
        job.report_calls(
            n + 1,
            {r: job.now + 0.0001 * r + (0.05 if r == 3 else 0) for r in range(4)},
            took_us=900,
        )
    view = job.group_view
    assert (
        view.straggler is not None and view.straggler.ranks == [3] and view.straggler.share == 1.0
    )
    assert 0.0490 < view.straggler.lag_s < 0.0505
    assert view.arrivals.uncertainty_s == 0.002
    assert (
        "rank 3 comes last in 100 % of the calls of dp_1, 50 ms after the others"
        in view.straggler.summary
    )
    (row,) = view.calls
    assert (row.op, row.size_from, row.calls, row.bytes) == ("all_reduce", 1024, 80, 80 * 1024)
    assert row.latency is not None and row.latency.count == 320
    assert row.wait is not None and 0.045 < row.wait.p50_s < 0.055
    assert row.transfer is not None and row.algbw_gbs is not None and row.busbw_gbs is not None
    assert abs(row.algbw_gbs / (1024 / 900e-6 / 1e9) - 1) < 0.05
    assert abs(row.busbw_gbs / row.algbw_gbs - 1.5) < 0.01, "2 (n - 1) / n"
    assert [s.op for s in view.series] == ["all_reduce"]
    assert all(
        p.spread_p50_s and 0.045 < p.spread_p50_s < 0.055 and p.latency_p50_s
        for p in view.series[0].points
    )


def test_device_calls_report_no_waiting() -> None:
    job = PerformanceJob(device=True)
    for n in range(80):
        job.now += 0.2
        job.report_calls(n + 1, {r: job.now + (0.05 if r == 3 else 0) for r in range(4)})
    late = job.group_view.straggler
    assert late is not None and late.ranks == [3] and late.waited_share is None
    assert "wait" not in late.summary and "50 ms after the others" in late.summary
    assert job.group_view.calls[0].latency is None and job.group_view.calls[0].busbw_gbs is None


def test_delay_below_clock_uncertainty_is_ignored() -> None:
    job = PerformanceJob(uncertain=0.04)
    for n in range(80):
        job.now += 0.2
        job.report_calls(n + 1, {r: job.now + (0.05 if r == 3 else 0) for r in range(4)})
    view = job.group_view
    assert view.straggler is None and view.arrivals.last == []
    assert view.arrivals.undecided == view.arrivals.compared == 80
    assert view.arrivals.spread is not None and view.arrivals.spread.max_s == 0.0


def test_a_healthy_job_has_no_straggler() -> None:
    job, rng = PerformanceJob(ranks=8), random.Random(7)
    for n in range(200):
        job.now += 0.1
        job.report_calls(n + 1, {r: job.now + rng.expovariate(200) for r in range(8)})
    assert job.group_view.straggler is None
    assert len(job.group_view.arrivals.last) == 8, "latecomers are listed nevertheless"


def test_repeated_reports_count_once() -> None:
    job = PerformanceJob(ranks=2)
    part = heartbeat.StreamPerformance(
        key="0-1", uid=1, totals=(heartbeat.CallTotals(op="barrier", size=0, calls=5, bytes=0),)
    )
    job.send_heartbeat(0, part, number=50)
    job.send_heartbeat(0, part, number=50)
    assert job.group_view.calls[0].calls == 5
    job.send_heartbeat(
        0, heartbeat.StreamPerformance(key="0-1", uid=77, totals=part.totals), number=51
    )
    job.send_heartbeat(
        0, heartbeat.StreamPerformance(key="9-9", uid=1, totals=part.totals), number=52
    )
    assert job.group_view.calls[0].calls == 5, "unknown streams and processes are ignored"


def test_memory_is_bounded() -> None:
    job = PerformanceJob(ranks=2)
    for n in range(3000):
        job.now += 1.0
        job.report_calls(10_000 + n, {0: job.now, 1: job.now})
        job.report_calls(n + 1, {0: job.now}, op=f"op{n}")
    (group,) = job.totals.get_job(job.latest_attempt).groups.values()
    assert (
        len(group.size_classes) <= MAX_SIZE_CLASS_ROWS + 1 and (OTHER_OPS, 0) in group.size_classes
    )
    assert len(group.arrivals.recent_skews) == MAX_COMPARED_CALLS and len(group._pending) <= 64
    assert max(len(h.closed_points) for h in group.histories.values()) == MAX_PERIODS
    assert set(job.totals.get_job(job.latest_attempt).operations) == {"all_reduce", OTHER_OPS}
    for n in range(MAX_GROUPS + 5):
        identity = heartbeat.StreamIdentity(
            kind=StreamKind.COLLECTIVE, name=f"g{n}", desc="", ranks="0-1"
        )
        joined = job.latest_attempt.join_group(job.latest_attempt.processes[0], identity)
        job.totals.get_job(job.latest_attempt).get_group(joined)
    assert len(job.totals.get_job(job.latest_attempt).groups) == MAX_GROUPS
