"""Who is named where results differ or numbers cease to be finite, in whatever order that is told;
and that nobody is where all is well.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from hangwatch.diagnosis import quiet
from hangwatch.model.calls import Call
from hangwatch.model.groups import Group
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.verdicts import Verdict
from hangwatch.protocol import heartbeat
from hangwatch.tracking.checks import PERSISTENT_ROUNDS, STREAK_GAP_S, ReplicaChecksums
from tests.unit.jobs import Job, Rank, signature


class Checked(Job):
    """A job whose heartbeats tell what its checks found."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.found: dict[int, list[tuple[int, int]]] = {}
        self.bad: dict[int, list[tuple[float, heartbeat.NonfiniteReport]]] = {}

    def result(self, rank: int, seq: int, checksum: int) -> None:
        self.found.setdefault(rank, []).append((seq, checksum))

    def nonfinite(
        self, rank: int, seq: int, *, group: str = "world", at: float | None = None, **told: object
    ) -> None:
        uid = self.ranks[rank].places[group].uid
        call = Call(
            seq=seq,
            signature=signature("all_reduce"),
            site=self.ranks[rank].places[group].calls[seq - 1].site,
        )
        entry = heartbeat.NonfiniteReport(
            uid=uid, seq=seq, call=call, **{"nan": 1, "first": seq, **told}
        )  # type: ignore[arg-type]
        self.bad.setdefault(rank, []).append((self.now if at is None else at, entry))

    def verdicts_of(self, kind: VerdictKind) -> list[Verdict]:
        self.heartbeat()
        self.wait(0.5)  # others have their say
        found = self.verdicts()
        assert quiet(self.attempt) <= (
            not [
                v
                for v in found
                if v.kind in (VerdictKind.REPLICA_DIVERGENCE, VerdictKind.NONFINITE)
            ]
        )
        return [v for v in found if v.kind is kind]

    def _update(self, rank: Rank) -> heartbeat.ProcessUpdate:
        update = super()._update(rank)
        place = rank.places.get("world")
        sums = (
            [
                (1, seq, place.calls[seq - 1].chain, told)
                for seq, told in self.found.pop(rank.number, ())
            ]
            if place
            else []
        )
        bad = tuple(replace(told, at_s=self.now - at) for at, told in self.bad.pop(rank.number, ()))
        return replace(update, checksums=tuple(sums), nonfinite=bad)


def ran(job: Checked, calls: int = 10, **arguments: object) -> Checked:
    for n in range(calls):
        job.everybody(line=n, **arguments)  # type: ignore[arg-type]
        job.wait(0.01)
    job.heartbeat()
    return job


def test_the_odd_one_is_named_with_call_and_line() -> None:
    job = ran(Checked(4))
    for rank in range(4):
        job.result(rank, 7, 70)
        job.result(rank, 8, 80 + (rank == 1))
        job.result(rank, 9, 90 + (rank == 1))
    (verdict,) = job.verdicts_of(VerdictKind.REPLICA_DIVERGENCE)
    assert (verdict.culprits, verdict.seq, verdict.severity, verdict.waiting) == (
        (1,),
        8,
        Severity.WARNING,
        (),
    )
    assert verdict.site is not None and verdict.site.line == 7
    assert [c.ranks for c in verdict.calls] == [(0, 2, 3), (1,)]
    assert (
        "rank 1 got another result from all_reduce at train.py:7 than ranks 0, 2-3 (call 8 of group world)"
        in verdict.summary
    )
    job.wait(3600.0)
    assert job.verdicts_of(VerdictKind.REPLICA_DIVERGENCE) == [verdict], (
        "replicas do not become equal again"
    )


def test_on_a_tie_all_are_named_but_in_a_broadcast_who_parts_from_its_root() -> None:
    for op, root, culprits in (
        ("all_reduce", None, (0, 1)),
        ("broadcast", 1, (0,)),
        ("broadcast", 0, (1,)),
    ):
        job = ran(Checked(2), op=op, root=root)
        job.result(0, 3, 1)
        job.result(1, 3, 2)
        (verdict,) = job.verdicts_of(VerdictKind.REPLICA_DIVERGENCE)
        assert verdict.culprits == culprits


def test_who_has_not_told_is_waited_for_a_little() -> None:
    job = ran(Checked(4))
    job.result(0, 3, 1)
    job.result(1, 3, 2)
    assert job.verdicts_of(VerdictKind.REPLICA_DIVERGENCE) == []
    job.wait(0.5)
    job.result(2, 3, 1)
    job.result(3, 3, 1)
    (verdict,) = job.verdicts_of(VerdictKind.REPLICA_DIVERGENCE)
    assert verdict.culprits == (1,)


def test_results_of_other_calls_are_not_compared() -> None:
    job = Checked(2)
    for rank, size in (
        (0, 8),
        (1, 9),
    ):  # the arguments differ: that is a mismatch, and nothing else
        job.call(rank, shape=(size,), done=True)
        job.result(rank, 1, size)
    job.wait(10.0)
    assert job.verdicts_of(VerdictKind.REPLICA_DIVERGENCE) == []


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 9), st.permutations(range(30)), st.integers(0, 8), st.booleans(), st.randoms()
)
def test_whatever_the_order_the_odd_one_is_found_and_no_other(
    size: int, seqs: list[int], odd: int, faulty: bool, order: object
) -> None:
    group = Group(name="0", desc="", ranks=tuple(range(size)))
    held = ReplicaChecksums(group=group)
    told = [(rank, seq) for rank in range(size) for seq in seqs[:12]]
    order.shuffle(told)  # type: ignore[attr-defined]
    bad = seqs[5]
    for rank, seq in told + told[:5]:  # some come twice, as after a resync
        held.record_checksum(
            rank, (seq, seq * 7), seq + (faulty and seq == bad and rank == odd % size), 1.0
        )
    assert set(held.differing) == ({(bad, bad * 7)} if faulty else set())
    if faulty:
        assert {odd % size} in held.differing[(bad, bad * 7)].ranks_by_checksum.values()


def test_what_one_member_never_tells_does_not_pile_up() -> None:
    held = ReplicaChecksums(group=Group(name="0", desc="", ranks=tuple(range(64))))
    for seq in range(5000):
        for rank in range(4):
            held.record_checksum(rank, (seq, seq), seq, 1.0)
            held.record_checksum(rank, (seq, seq + 1), seq + rank, 1.0)
    assert (
        len(held.incomplete) <= 256 and len(held.differing) <= 8 and min(held.differing) == (0, 1)
    )


def test_nan_is_traced_to_where_it_entered() -> None:
    job = ran(Checked(4))
    job.nonfinite(2, 5, nan=3)
    job.wait(0.05)
    for rank in range(4):  # from there it spread
        job.nonfinite(rank, 7)
    job.wait(1.0)
    (verdict,) = job.verdicts_of(VerdictKind.NONFINITE)
    assert (verdict.culprits, verdict.seq, verdict.differing_fields) == ((2,), 5, ("input",))
    assert verdict.site is not None and verdict.site.line == 4
    assert verdict.summary.startswith(
        "rank 2 put NaN into all_reduce at train.py:4 (call 5 of group world)"
    )
    job.wait(STREAK_GAP_S + 1)
    assert job.verdicts_of(VerdictKind.NONFINITE) == [], "it is over"


@settings(max_examples=25, deadline=None)
@given(st.permutations(range(4)), st.integers(0, 3))
def test_nan_in_two_groups_is_traced_by_time_and_by_number(order: list[int], source: int) -> None:
    """Heartbeats of four ranks come in any order; clocks of hosts are off by some milliseconds."""
    job = Checked(4)
    job.group("pair", (0, 1))
    ran(job)
    for _ in range(3):
        job.everybody(group="pair")
    job.nonfinite(source, 4, at=job.now)
    for rank in order:
        job.nonfinite(rank, 6, at=job.now + 0.02 * (rank + 1))
        if rank < 2:
            job.nonfinite(rank, 2, group="pair", at=job.now + 0.2)
    job.wait(1.0)
    (verdict,) = job.verdicts_of(VerdictKind.NONFINITE)
    assert (verdict.culprits, verdict.seq) == ((source,), 4)


def test_a_rank_that_is_not_heard_may_have_been_the_first() -> None:
    job = ran(Checked(2))
    job.ranks[1].host = "node1"
    job.heartbeat()
    job.ranks[1].heard = False
    job.wait(1.0)
    job.nonfinite(0, 6)
    job.wait(1.0)
    assert job.verdicts_of(VerdictKind.NONFINITE) == []
    job.nonfinite(1, 5, at=job.now - 1.1)
    job.ranks[1].heard = True
    (verdict,) = job.verdicts_of(VerdictKind.NONFINITE)
    assert (verdict.culprits, verdict.seq) == ((1,), 5)


def test_under_loss_scaling_only_what_lasts_is_told() -> None:
    job = ran(Checked(2), 400)
    for n in range(PERSISTENT_ROUNDS):
        for rank in range(2):
            job.nonfinite(rank, 10 + n, inf=5, nan=0, scaled=True, first=10, rounds=n)
        job.wait(0.1)
    job.wait(2.0)
    assert job.verdicts_of(VerdictKind.NONFINITE) == [] and quiet(job.attempt)
    job.nonfinite(1, 200, inf=5, nan=0, scaled=True, first=200, rounds=0)
    job.nonfinite(0, 300, inf=5, nan=0, scaled=True, first=200, rounds=PERSISTENT_ROUNDS)
    job.wait(1.0)
    (verdict,) = job.verdicts_of(VerdictKind.NONFINITE)
    assert (verdict.culprits, verdict.seq) == ((1,), 200), "where the run of calls began"
    assert f"for {PERSISTENT_ROUNDS} rounds" in verdict.summary


def test_a_sum_that_overflows_is_nobodys_fault() -> None:
    job = ran(Checked(2))
    for rank in range(2):
        job.nonfinite(rank, 4, inf=9, nan=0, output=True)
    job.wait(1.0)
    (verdict,) = job.verdicts_of(VerdictKind.NONFINITE)
    assert (verdict.culprits, verdict.differing_fields) == ((), ("output",))
    assert "no rank was seen to put any in" in verdict.summary
    assert verdict.calls[0].ranks == (0, 1)


def test_who_waited_long_in_the_call_does_not_hasten_the_verdict() -> None:
    """Rank 0 stood in the call for a second until rank 1 came, with a NaN, which is told in the
    next heartbeat.
    """
    job = ran(Checked(2))
    job.nonfinite(0, 6, output=True, at=job.now - 1.0)
    job.heartbeat()
    assert [v for v in job.diagnose().verdicts if v.is_confirmed] == []
    job.wait(0.5)
    job.nonfinite(1, 6)
    (verdict,) = job.verdicts_of(VerdictKind.NONFINITE)
    assert verdict.culprits == (1,)
