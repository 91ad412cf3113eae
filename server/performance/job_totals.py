"""The performance of the calls of one job, by process group and by operation."""

from __future__ import annotations

from dataclasses import dataclass, field

from hangwatch.model.groups import Group, GroupKey
from hangwatch.model.operators import OPERATIONS
from hangwatch.performance.distributions import DurationHistogram
from hangwatch.protocol import heartbeat

from .group_totals import OTHER_OPS, GroupTotals, OperationTotals

MAX_GROUPS = 2048  # of an attempt


@dataclass(slots=True, kw_only=True)
class JobTotals:
    """The totals of one attempt of a job."""

    groups: dict[GroupKey, GroupTotals] = field(default_factory=dict)
    ignored_reports: int = 0  # of groups beyond `MAX_GROUPS`
    operations: dict[str, OperationTotals] = field(default_factory=dict)  # in all groups
    spread: DurationHistogram = field(default_factory=DurationHistogram)

    def add_report(self, part: heartbeat.StreamPerformance) -> None:
        for reported in part.totals:
            op = reported.op if reported.op in OPERATIONS else OTHER_OPS
            self.operations.setdefault(op, OperationTotals()).add_report(reported)

    def merge_operations(self, other: JobTotals) -> None:
        """Adds another job's operations and spread."""
        for op, added in other.operations.items():
            totals = self.operations.setdefault(op, OperationTotals())
            totals.calls += added.calls
            totals.bytes += added.bytes
            totals.latency.merge_counts(added.latency.counts.items(), added.latency.longest_us)
        self.spread.merge_counts(other.spread.counts.items(), other.spread.longest_us)

    def get_group(self, group: Group) -> GroupTotals | None:
        """The totals of a group, created if needed; None beyond `MAX_GROUPS`."""
        totals = self.groups.get(group.key)
        if totals is None:
            if len(self.groups) >= MAX_GROUPS:
                self.ignored_reports += 1
                return None
            totals = self.groups[group.key] = GroupTotals(group=group)
        return totals
