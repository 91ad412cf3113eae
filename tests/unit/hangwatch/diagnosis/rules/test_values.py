"""Which ranks are named if results differ or become nonfinite, in any order of reports; healthy jobs
get no verdict.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from hangwatch.diagnosis import is_quiet
from hangwatch.model.calls import Call
from hangwatch.model.groups import Group
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.limits import PERSISTENT_ROUNDS
from hangwatch.model.verdicts import Verdict
from hangwatch.protocol import heartbeat
from hangwatch.tracking.checks import STREAK_GAP_S, ReplicaChecksums
from tests.simulation.scripted_job import ScriptedJob, ScriptedRank, make_signature


class CheckedJob(ScriptedJob):
    """A job whose heartbeats report the results of its checks."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.results: dict[int, list[tuple[int, int]]] = {}
        self.nonfinite_calls: dict[int, list[tuple[float, heartbeat.NonfiniteReport]]] = {}

    def add_result(self, rank: int, seq: int, checksum: int) -> None:
        self.results.setdefault(rank, []).append((seq, checksum))

    def add_nonfinite(
        self,
        rank: int,
        seq: int,
        *,
        group: str = "world",
        at: float | None = None,
        **report_fields: Any,
    ) -> None:
        uid = self.ranks[rank].streams[group].uid
        call = Call(
            seq=seq,
            signature=make_signature("all_reduce"),
            site=self.ranks[rank].streams[group].calls[seq - 1].site,
        )
        entry = heartbeat.NonfiniteReport(
            uid=uid, seq=seq, call=call, **{"nan": 1, "first": seq, **report_fields}
        )
        self.nonfinite_calls.setdefault(rank, []).append((self.now if at is None else at, entry))

    def list_verdicts(self, kind: VerdictKind) -> list[Verdict]:
        self.send_heartbeats()
        self.advance_time(0.5)  # late reports of other ranks arrive
        verdicts = self.list_due_verdicts()
        assert is_quiet(self.latest_attempt, self.now, self.limits) <= (
            not [
                v
                for v in verdicts
                if v.kind in (VerdictKind.REPLICA_DIVERGENCE, VerdictKind.NONFINITE)
            ]
        )
        return [v for v in verdicts if v.kind is kind]

    def make_process_update(self, rank: ScriptedRank) -> heartbeat.ProcessUpdate:
        update = super().make_process_update(rank)
        stream = rank.streams.get("world")
        checksums = (
            [
                (1, seq, stream.calls[seq - 1].chain, checksum)
                for seq, checksum in self.results.pop(rank.number, ())
            ]
            if stream
            else []
        )
        nonfinite = tuple(
            replace(report, at_s=self.now - at)
            for at, report in self.nonfinite_calls.pop(rank.number, ())
        )
        return replace(update, checksums=tuple(checksums), nonfinite=nonfinite)


def run_calls(job: CheckedJob, calls: int = 10, **arguments: object) -> CheckedJob:
    for n in range(calls):
        job.make_calls(line=n, **arguments)  # type: ignore[arg-type]
        job.advance_time(0.01)
    job.send_heartbeats()
    return job


def test_outlier_is_named_with_call_and_line() -> None:
    job = run_calls(CheckedJob(4))
    for rank in range(4):
        job.add_result(rank, 7, 70)
        job.add_result(rank, 8, 80 + (rank == 1))
        job.add_result(rank, 9, 90 + (rank == 1))
    (verdict,) = job.list_verdicts(VerdictKind.REPLICA_DIVERGENCE)
    assert (verdict.culprits, verdict.seq, verdict.severity, verdict.waiting) == (
        (1,),
        8,
        Severity.WARNING,
        (),
    )
    assert verdict.site is not None and verdict.site.line == 7
    assert [c.ranks for c in verdict.calls] == [(0, 2, 3), (1,)]
    assert (
        "rank 1 got a different result from all_reduce at train.py:7 than ranks 0, 2-3 (call 8 of group"
        " world)" in verdict.summary
    )
    job.advance_time(3600.0)
    assert job.list_verdicts(VerdictKind.REPLICA_DIVERGENCE) == [verdict], (
        "replicas do not become equal again"
    )


def test_tie_names_all_but_broadcast_names_ranks_differing_from_root() -> None:
    for op, root, culprits in (
        ("all_reduce", None, (0, 1)),
        ("broadcast", 1, (0,)),
        ("broadcast", 0, (1,)),
    ):
        job = run_calls(CheckedJob(2), op=op, root=root)
        job.add_result(0, 3, 1)
        job.add_result(1, 3, 2)
        (verdict,) = job.list_verdicts(VerdictKind.REPLICA_DIVERGENCE)
        assert verdict.culprits == culprits


def test_missing_checksum_is_awaited_briefly() -> None:
    job = run_calls(CheckedJob(4))
    job.add_result(0, 3, 1)
    job.add_result(1, 3, 2)
    assert job.list_verdicts(VerdictKind.REPLICA_DIVERGENCE) == []
    job.advance_time(0.5)
    job.add_result(2, 3, 1)
    job.add_result(3, 3, 1)
    (verdict,) = job.list_verdicts(VerdictKind.REPLICA_DIVERGENCE)
    assert verdict.culprits == (1,)


def test_results_of_other_calls_are_not_compared() -> None:
    job = CheckedJob(2)
    for rank, size in (
        (0, 8),
        (1, 9),
    ):  # arguments that differ are a mismatch, not a divergence
        job.make_call(rank, shape=(size,), done=True)
        job.add_result(rank, 1, size)
    job.advance_time(10.0)
    assert job.list_verdicts(VerdictKind.REPLICA_DIVERGENCE) == []


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 9), st.permutations(range(30)), st.integers(0, 8), st.booleans(), st.randoms()
)
def test_outlier_is_found_in_any_report_order(
    size: int, seqs: list[int], outlier: int, faulty: bool, order: object
) -> None:
    group = Group(name="0", desc="", ranks=tuple(range(size)))
    checksums = ReplicaChecksums(group=group)
    reports = [(rank, seq) for rank in range(size) for seq in seqs[:12]]
    order.shuffle(reports)  # type: ignore[attr-defined]
    differing_seq = seqs[5]
    for rank, seq in reports + reports[:5]:  # some come twice, as after a resync
        checksums.record_checksum(
            rank,
            (seq, seq * 7),
            seq + (faulty and seq == differing_seq and rank == outlier % size),
            1.0,
        )
    assert set(checksums.differing) == ({(differing_seq, differing_seq * 7)} if faulty else set())
    if faulty:
        assert {outlier % size} in checksums.differing[
            (differing_seq, differing_seq * 7)
        ].ranks_by_checksum.values()


def test_unreported_results_do_not_accumulate() -> None:
    checksums = ReplicaChecksums(group=Group(name="0", desc="", ranks=tuple(range(64))))
    for seq in range(5000):
        for rank in range(4):
            checksums.record_checksum(rank, (seq, seq), seq, 1.0)
            checksums.record_checksum(rank, (seq, seq + 1), seq + rank, 1.0)
    assert (
        len(checksums.incomplete) <= 256
        and len(checksums.differing) <= 8
        and min(checksums.differing) == (0, 1)
    )


def test_nan_is_traced_to_its_origin() -> None:
    job = run_calls(CheckedJob(4))
    job.add_nonfinite(2, 5, nan=3)
    job.advance_time(0.05)
    for rank in range(4):  # the next reduction spreads it to all ranks
        job.add_nonfinite(rank, 7)
    job.advance_time(1.0)
    (verdict,) = job.list_verdicts(VerdictKind.NONFINITE)
    assert (verdict.culprits, verdict.seq, verdict.differing_fields) == ((2,), 5, ("input",))
    assert verdict.site is not None and verdict.site.line == 4
    assert verdict.summary.startswith(
        "rank 2 put NaN into all_reduce at train.py:4 (call 5 of group world)"
    )
    job.advance_time(STREAK_GAP_S + 1)
    assert job.list_verdicts(VerdictKind.NONFINITE) == [], "the streak has ended"


@settings(max_examples=25, deadline=None)
@given(st.permutations(range(4)), st.integers(0, 3))
def test_nan_in_two_groups_is_traced_by_time_and_by_number(order: list[int], source: int) -> None:
    """Four ranks report in any order; the hosts' clocks differ by some milliseconds."""
    job = CheckedJob(4)
    job.add_group("pair", (0, 1))
    run_calls(job)
    for _ in range(3):
        job.make_calls(group="pair")
    job.add_nonfinite(source, 4, at=job.now)
    for rank in order:
        job.add_nonfinite(rank, 6, at=job.now + 0.02 * (rank + 1))
        if rank < 2:
            job.add_nonfinite(rank, 2, group="pair", at=job.now + 0.2)
    job.advance_time(1.0)
    (verdict,) = job.list_verdicts(VerdictKind.NONFINITE)
    assert (verdict.culprits, verdict.seq) == ((source,), 4)


def test_nonreporting_rank_may_be_nan_origin() -> None:
    job = run_calls(CheckedJob(2))
    job.ranks[1].host = "node1"
    job.send_heartbeats()
    job.ranks[1].is_reporting = False
    job.advance_time(1.0)
    job.add_nonfinite(0, 6)
    job.advance_time(1.0)
    assert job.list_verdicts(VerdictKind.NONFINITE) == []
    job.add_nonfinite(1, 5, at=job.now - 1.1)
    job.ranks[1].is_reporting = True
    (verdict,) = job.list_verdicts(VerdictKind.NONFINITE)
    assert (verdict.culprits, verdict.seq) == ((1,), 5)


def test_with_loss_scaling_only_lasting_nonfinite_is_reported() -> None:
    job = run_calls(CheckedJob(2), 400)
    for n in range(PERSISTENT_ROUNDS):
        for rank in range(2):
            job.add_nonfinite(rank, 10 + n, inf=5, nan=0, scaled=True, first=10, rounds=n)
        job.advance_time(0.1)
    job.advance_time(2.0)
    assert job.list_verdicts(VerdictKind.NONFINITE) == []
    assert is_quiet(job.latest_attempt, job.now, job.limits)
    job.add_nonfinite(1, 200, inf=5, nan=0, scaled=True, first=200, rounds=0)
    job.add_nonfinite(0, 300, inf=5, nan=0, scaled=True, first=200, rounds=PERSISTENT_ROUNDS)
    job.advance_time(1.0)
    (verdict,) = job.list_verdicts(VerdictKind.NONFINITE)
    assert (verdict.culprits, verdict.seq) == ((1,), 200), (
        "where the streak of nonfinite calls began"
    )
    assert f"none of the last {PERSISTENT_ROUNDS} rounds" in verdict.summary


def test_overflowing_sum_blames_no_rank() -> None:
    job = run_calls(CheckedJob(2))
    for rank in range(2):
        job.add_nonfinite(rank, 4, inf=9, nan=0, output=True)
    job.advance_time(1.0)
    (verdict,) = job.list_verdicts(VerdictKind.NONFINITE)
    assert (verdict.culprits, verdict.differing_fields) == ((), ("output",))
    assert "no rank's input is known to contain any" in verdict.summary
    assert verdict.calls[0].ranks == (0, 1)


def test_long_wait_in_call_does_not_hasten_verdict() -> None:
    """Rank 0 was blocked in the call for a second until rank 1 entered with a NaN, which only the
    next heartbeat reports.
    """
    job = run_calls(CheckedJob(2))
    job.add_nonfinite(0, 6, output=True, at=job.now - 1.0)
    job.send_heartbeats()
    assert [v for v in job.run_diagnosis().verdicts if v.is_confirmed] == []
    job.advance_time(0.5)
    job.add_nonfinite(1, 6)
    (verdict,) = job.list_verdicts(VerdictKind.NONFINITE)
    assert verdict.culprits == (1,)
