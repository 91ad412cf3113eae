"""A mismatch after hundreds or thousands of quick calls, with few running hashes in heartbeats.

``HANGWATCH_EXAMPLES=2000 pytest tests/unit/hangwatch/diagnosis/rules/test_late_mismatches.py`` tries thousands of
jobs.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import event, given, note
from hypothesis import strategies as st

from hangwatch.model.calls import Signature, StreamKind
from hangwatch.model.groups import Group
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.limits import Limits
from hangwatch.model.ranks import Lifecycle
from hangwatch.model.verdicts import Verdict
from tests.simulation.model_cluster import ModelCluster
from tests.simulation.model_job import (
    FOREVER_S,
    BeginLifecycle,
    EnterCall,
    Instruction,
    ModelJob,
    ModelStream,
    RunOwnCode,
    make_setup_signature,
    make_signature,
)
from tests.simulation.scripted_job import ScriptedJob

from ..test_properties import example_settings

LIMITS = Limits(stall_after_s=8.0, slow_limit_s=40.0)
# The modelled agents get requests only with the replies to their heartbeats, and each narrows the
# calls down once.
DUE_WITHIN_S = 7.0
USUAL = make_signature("all_reduce", reduce_op="sum")
OTHER_CALLS = {
    "op": make_signature("broadcast", root=0),
    "dtype": make_signature("all_reduce", reduce_op="sum", dtype="bfloat16"),
    "shape": make_signature("all_reduce", reduce_op="sum", numel=32),
    "reduce_op": make_signature("all_reduce", reduce_op="max"),
}


@dataclass(frozen=True)
class LateMismatch:
    """``ranks`` of the group ``members`` differ in call ``seq``, each time after ``burst`` calls that
    take no time. ``field`` is what differs, or "skipped" or "added" for a call.
    """

    size: int
    members: tuple[int, ...]
    ranks: tuple[int, ...]
    field: str
    seq: int
    later_calls: int
    burst: int
    hangs: bool
    pauses: tuple[float, ...]
    hosts: int
    ring_calls: int  # the calls that a ring has room for
    is_logged: bool  # the node agent has read the calls that its ring no longer has

    def list_signatures(self, rank: int) -> list[Signature]:
        """The calls of a rank in the group, each step a few all-reduces and a broadcast."""
        total = self.seq + self.later_calls
        usual = [
            USUAL if n % 7 else make_signature("broadcast", root=1) for n in range(1, total + 1)
        ]
        if rank in self.ranks:
            if self.field == "skipped":
                del usual[self.seq - 1]
            elif self.field == "added":
                usual.insert(self.seq - 1, USUAL)
            else:
                usual[self.seq - 1] = OTHER_CALLS[self.field]
        return usual

    def find_first_difference(self) -> int:
        calls = [self.list_signatures(rank) for rank in self.members]
        for seq, made in enumerate(zip(*calls, strict=False), 1):
            if len({signature.agree for signature in made}) > 1:
                return seq
        return 0

    def make_program(self, rank: int) -> list[Instruction]:
        world = tuple(range(self.size))
        setup = ModelStream(StreamKind.SETUP, Group(name="setup", desc="set-up", ranks=world))
        stream = ModelStream(
            StreamKind.COLLECTIVE,
            Group(name="1", desc="group1", ranks=self.members, backend="gloo"),
        )
        program: list[Instruction] = [
            BeginLifecycle(Lifecycle.INITIALISING),
            EnterCall(setup, make_setup_signature("init_process_group"), -1),
            BeginLifecycle(Lifecycle.INITIALISED),
            RunOwnCode(2.0),
        ]
        if rank in self.members:
            for n, signature in enumerate(self.list_signatures(rank)):
                program.append(EnterCall(stream, signature, n))
                if n % self.burst == self.burst - 1:
                    program.append(RunOwnCode(self.pauses[n // self.burst % len(self.pauses)]))
        return [*program, RunOwnCode(FOREVER_S)]

    def build_job(self) -> ModelJob:
        world = range(self.size)
        return ModelJob(
            {rank: self.make_program(rank) for rank in world},
            {rank: f"node{rank * self.hosts // self.size}" for rank in world},
            mismatch_hangs=self.hangs,
        )


@st.composite
def draw_mismatches(draw: st.DrawFn, hangs: bool) -> LateMismatch:
    size = draw(st.integers(3, 5))
    member_count = draw(st.integers(3, size))
    members = tuple(sorted(draw(st.permutations(range(size)))[:member_count]))
    differing_count = 1 if member_count == 3 else draw(st.integers(1, member_count // 2))
    ranks = tuple(sorted(draw(st.permutations(members))[:differing_count]))
    fields = [*OTHER_CALLS, "skipped", "added"]
    burst = draw(st.sampled_from((9, 40, 300, 1300, 10_000)))
    return LateMismatch(
        size=size,
        members=members,
        ranks=ranks,
        field=draw(st.sampled_from(fields)),
        seq=draw(st.integers(1, min(2500, 50 * burst))),
        # Without a wait, two counts are compared only at a multiple of some power of two.
        later_calls=draw(st.sampled_from((7, 20, 150, 700) if hangs else (150, 700))),
        burst=burst,
        hangs=hangs,
        pauses=tuple(draw(st.lists(st.sampled_from((0.1, 0.3, 0.7)), min_size=1, max_size=3))),
        hosts=draw(st.integers(1, 2)),
        ring_calls=draw(st.sampled_from((128, 512, 2048))),
        is_logged=draw(st.booleans()),
    )


def find_agreeing_verdicts(verdicts: list[Verdict]) -> list[Verdict]:
    return [v for v in verdicts if "the same call" in v.summary]


def check_mismatch(late: LateMismatch) -> None:
    note(str(late))
    world = ModelCluster(
        late.build_job(), LIMITS, ring_calls=late.ring_calls, logs_calls=late.is_logged
    )
    first = late.find_first_difference()
    is_tie = 2 * len(late.ranks) == len(late.members)
    expected = late.members if is_tie else late.ranks
    due: list[Verdict] = []
    entered_at = 0.0
    while world.job.now < 120.0 and not due:
        has_news = world.run_step()
        streams = [
            calls
            for rank in late.members
            for stream, calls in world.job.ranks[rank].calls.items()
            if stream.kind is StreamKind.COLLECTIVE
        ]
        is_entered = len(streams) == len(late.members) and all(
            len(calls) >= first for calls in streams
        )
        if not entered_at and is_entered:
            entered_at = world.job.now
        if has_news:
            due = [v for v in world.run_diagnosis().verdicts if v.is_confirmed]
        assert not entered_at or due or world.job.now < entered_at + DUE_WITHIN_S
    (verdict,) = due
    assert (verdict.kind, verdict.culprits) == (VerdictKind.MISMATCH, expected), verdict.summary
    assert verdict.seq is not None
    assert not find_agreeing_verdicts(due)
    if "at or before" in verdict.summary:
        assert not late.is_logged and late.ring_calls < 2048, verdict.summary
        assert verdict.seq >= first and not verdict.calls
        event("at or before")
    else:
        assert verdict.seq == first, verdict.summary
        if late.field in OTHER_CALLS and late.seq % 7 and verdict.calls:
            assert verdict.differing_fields == (late.field,)
        assert verdict.calls or not late.is_logged
    event(late.field)


@example_settings(40)
@given(draw_mismatches(hangs=True))
def test_late_mismatch_that_hangs_is_named(late: LateMismatch) -> None:
    check_mismatch(late)


@example_settings(40)
@given(draw_mismatches(hangs=False))
def test_late_mismatch_that_completes_is_named(late: LateMismatch) -> None:
    check_mismatch(late)


def make_job_with_mismatch(world_size: int, outliers: tuple[int, ...]) -> ScriptedJob:
    """Heartbeats after some of the first 89 calls; then the outliers make another call."""
    job = ScriptedJob(world_size)
    for entered in range(1, 90):
        job.make_calls()
        if entered in (4, 12, 27, 35, 49, 59):
            job.send_heartbeats()
            job.advance_time(0.5)
    for rank in range(world_size):
        job.make_call(rank, "broadcast" if rank in outliers else "all_reduce")
    return job


def test_older_hashes_that_were_requested_do_not_displace_the_difference() -> None:
    job = make_job_with_mismatch(4, (2, 3))
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.seq) == (VerdictKind.MISMATCH, (0, 1, 2, 3), 90)
    job.advance_time(20.0)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.seq) == (VerdictKind.MISMATCH, 90)


def test_what_is_certain_is_reported_if_requested_calls_never_arrive() -> None:
    job = make_job_with_mismatch(4, (2,))
    for _ in range(20):
        job.make_calls()
    job.send_heartbeats()
    assert not any(verdict.is_confirmed for verdict in job.run_diagnosis().verdicts)
    for _ in range(8):
        job.advance_time(0.5)
        job.send_heartbeats()
    (verdict,) = job.run_diagnosis().verdicts
    assert verdict.is_confirmed
    assert (verdict.kind, verdict.culprits, verdict.calls) == (VerdictKind.MISMATCH, (2,), ())
    assert verdict.summary == (
        "the calls of rank 2 differ from those of the other ranks at or before call 96 of group"
        " world, and after call 80; the records of the calls in between could not be fetched"
    )


def test_ranks_make_the_same_call_only_if_their_hashes_are_equal() -> None:
    job = ScriptedJob(4)
    for _ in range(10):
        job.make_calls()
    job.make_calls(done=False)
    job.advance_time(10.5)
    job.send_heartbeats()
    streams = job.latest_attempt.streams_by_group[next(iter(job.latest_attempt.streams_by_group))]
    for stream in streams.values():
        stream.reported_hashes = ()
    diagnosis = job.run_diagnosis()
    (verdict,) = diagnosis.verdicts
    assert verdict.kind is VerdictKind.NO_PROGRESS
    assert verdict.summary == (
        "all 4 ranks entered call 11 and none finishes: all_reduce on rank 0 (call 11 of group"
        " world); whether they made the same call is not known yet"
    )
    assert "match" not in verdict.advice
    windows = {(r.rank, r.from_seq, r.to_seq) for r in diagnosis.requests if r.stream_uid}
    assert windows == {(rank, 11, 11) for rank in range(4)}
    (verdict,) = job.list_due_verdicts()
    assert verdict.summary.startswith("all 4 ranks made the same call and none finishes")
