"""Any job, with heartbeats in any order, opens an incident for its planted fault and no other one.
A healthy job opens none.

``HANGWATCH_EXAMPLES=2000 pytest tests/unit/hangwatch/diagnosis/test_properties.py`` tries thousands of
jobs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hypothesis import HealthCheck, assume, event, given, note, seed, settings
from hypothesis import strategies as st

from hangwatch.model.calls import Signature, StreamKind
from hangwatch.model.groups import Group
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.limits import Limits
from hangwatch.model.ranks import Lifecycle
from hangwatch.model.verdicts import Verdict
from tests.simulation.model_cluster import HeartbeatDelivery, ModelCluster
from tests.simulation.model_job import (
    FOREVER_S,
    AwaitEvent,
    BeginLifecycle,
    EndProcess,
    EnterCall,
    Instruction,
    ModelJob,
    ModelStream,
    RunOwnCode,
    StopProcess,
    make_setup_signature,
    make_signature,
    remove_event,
)

_Test = TypeVar("_Test", bound=Callable[..., None])
REQUESTED_EXAMPLES = int(os.environ.get("HANGWATCH_EXAMPLES", "0"))  # jobs for each property


def example_settings(examples: int) -> Callable[[_Test], _Test]:
    """Settings for ``examples`` jobs, always the same ones, whatever the test is called; or for
    ``HANGWATCH_EXAMPLES`` random jobs.
    """
    chosen = settings(
        max_examples=REQUESTED_EXAMPLES or examples, deadline=None, database=None, print_blob=False,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    return chosen if REQUESTED_EXAMPLES else lambda test: seed(1)(chosen(test))


LIMITS = Limits(stall_after_s=8.0, slow_limit_s=40.0)
SETTLE_S = 5.0  # seconds by which a verdict may be later than it is due
COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather_into_tensor",
    "barrier",
    "scatter",
    "gather",
    "reduce_scatter_tensor",
)
SETUP_GROUP = Group(name="setup", desc="set-up", ranks=())


@dataclass(frozen=True)
class PlannedOperation:
    """What some ranks do together: a collective of ``group``, or messages from ``senders`` to
    ``to``.
    """

    group: int = 0
    op: str = ""
    numel: int = 64
    root: int = 0
    senders: tuple[int, ...] = ()
    receiver: int = 0
    tag: int = 0
    any_source: bool = False
    is_async: bool = False  # asynchronous, and waited for ...
    awaited_after: int = 0  # ... so many happenings later


@dataclass(frozen=True)
class Slowdown:
    rank: int
    before_part: int
    seconds: float
    manner: str


@dataclass(frozen=True)
class JobPlan:
    """A healthy job. All ranks make their calls in one global order, so it cannot deadlock."""

    size: int
    groups: tuple[tuple[int, ...], ...]
    operations: tuple[PlannedOperation, ...]
    hosts: int = 1
    seed: int = 0
    eager: bool = True
    visible: bool = True
    slowdowns: tuple[Slowdown, ...] = ()

    def make_group(self, index: int) -> Group:
        return Group(
            name=str(index), desc=f"group{index}", ranks=self.groups[index], backend="gloo"
        )

    def make_stream(self, operation: PlannedOperation) -> ModelStream:
        return ModelStream(StreamKind.COLLECTIVE, self.make_group(operation.group))

    def fault_group(self, fault: PlannedFault) -> tuple[int, ...]:
        return self.groups[self.operations[fault.before_part - 1].group]

    def setup_stream(self) -> ModelStream:
        return ModelStream(StreamKind.SETUP, replace(SETUP_GROUP, ranks=tuple(range(self.size))))

    def list_participants(self, operation: PlannedOperation) -> set[int]:
        return (
            {*operation.senders, operation.receiver}
            if operation.senders
            else set(self.groups[operation.group])
        )

    def program_parts(self, rank: int) -> list[list[Instruction]]:
        """A rank's program: what it does before, in each happening, and after them."""
        begin: list[Instruction] = [
            RunOwnCode(0.3), BeginLifecycle(Lifecycle.INITIALISING), EnterCall(self.setup_stream(), make_setup_signature("init_process_group"), -1),
            BeginLifecycle(Lifecycle.INITIALISED),
        ]  # fmt: skip
        begin += [
            EnterCall(self.setup_stream(), make_setup_signature("new_group", ranks), -2 - n)
            for n, ranks in enumerate(self.groups[1:])
        ]
        parts: list[list[Instruction]] = [begin]
        pending: list[tuple[int, int]] = []
        for n, happening in enumerate(self.operations):
            part: list[Instruction] = [AwaitEvent(e) for due, e in pending if due <= n]
            pending = [(due, e) for due, e in pending if due > n]
            part += [
                RunOwnCode(
                    s.seconds,
                    busy=s.manner == "busy",
                    phase="save" if s.manner == "phase" else None,
                    limit=60.0 if s.manner == "phase" else None,
                )
                for s in self.slowdowns
                if (s.rank, s.before_part) == (rank, n)
            ]
            if rank in self.list_participants(happening):
                part += [
                    RunOwnCode(0.1 * ((self.seed * 7919 + rank * 31 + n * 17) % 4)),
                    *self.program_operation(rank, n, happening),
                ]
                if happening.is_async:
                    pending.append((n + happening.awaited_after, n))
            parts.append(part)
        end: list[Instruction] = [AwaitEvent(e) for _, e in pending]
        parts.append(
            [
                *end,
                BeginLifecycle(Lifecycle.DESTROYED),
                BeginLifecycle(Lifecycle.EXITING),
                RunOwnCode(0.2),
                EndProcess(status=0),
            ]
        )
        return parts

    def program_operation(
        self, rank: int, n: int, operation: PlannedOperation
    ) -> list[Instruction]:
        free = operation.is_async
        if not operation.senders:
            return [
                EnterCall(
                    self.make_stream(operation),
                    self.make_operation_signature(operation),
                    n,
                    not free,
                    free,
                )
            ]
        world = self.make_group(0)
        if rank != operation.receiver:
            sent = ModelStream(StreamKind.SEND, world, operation.receiver, operation.tag)
            return [EnterCall(sent, make_signature("send", numel=operation.numel), n, None, free)]
        froms = (-1,) * len(operation.senders) if operation.any_source else operation.senders
        made = make_signature(
            "recv_any_source" if operation.any_source else "recv", numel=operation.numel
        )
        return [
            EnterCall(ModelStream(StreamKind.RECV, world, peer, operation.tag), made, n, None, free)
            for peer in froms
        ]

    def make_operation_signature(self, operation: PlannedOperation) -> Signature:
        op = operation.op
        rooted, reduced = (
            op in ("broadcast", "reduce", "scatter", "gather"),
            op in ("all_reduce", "reduce", "reduce_scatter_tensor"),
        )
        root = operation.root % len(self.groups[operation.group]) if rooted else None
        return make_signature(
            op, numel=operation.numel, reduce_op="sum" if reduced else None, root=root
        )

    def build_job(
        self, parts: dict[int, list[list[Instruction]]] | None = None, **how: Any
    ) -> ModelJob:
        parts = parts or {r: self.program_parts(r) for r in range(self.size)}
        programs = {r: [i for part in p for i in part] for r, p in parts.items()}
        hosts = {r: f"node{r * self.hosts // self.size}" for r in range(self.size)}
        return ModelJob(
            programs, hosts, seed=self.seed, eager=self.eager, visible=self.visible, **how
        )


@st.composite
def draw_plans(draw: st.DrawFn, slow: bool = False, least: int = 1) -> JobPlan:
    size = draw(st.integers(2, 8))
    world = tuple(range(size))
    groups = [world]
    layout = draw(st.sampled_from(("world", "grid", "subsets")))
    if layout == "grid":
        inner = draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
        groups += [tuple(range(i, i + inner)) for i in range(0, size, inner)] + [
            tuple(range(i, size, inner)) for i in range(inner)
        ]
    elif layout == "subsets":
        chosen = st.lists(st.sampled_from(world), min_size=2, unique=True).map(
            lambda ranks: tuple(sorted(ranks))
        )
        groups += draw(st.lists(chosen, max_size=3))
    groups = [world, *dict.fromkeys(g for g in groups[1:] if len(g) > 1 and g != world)]
    collective = st.builds(
        PlannedOperation,
        group=st.integers(0, len(groups) - 1),
        op=st.sampled_from(COLLECTIVES),
        numel=st.sampled_from((64, 32)),
        root=st.integers(0, 7),
        is_async=st.booleans(),
        awaited_after=st.integers(1, 4),
    )
    pair = st.lists(st.sampled_from(world), min_size=2, max_size=2, unique=True)
    message = st.builds(
        lambda ends, **rest: PlannedOperation(senders=(ends[0],), receiver=ends[1], **rest),
        pair, tag=st.integers(0, 1), is_async=st.booleans(), awaited_after=st.integers(1, 4),
    )  # fmt: skip
    happenings = draw(st.lists(st.one_of(collective, message), min_size=least, max_size=14))
    for n, to in enumerate(draw(st.lists(st.sampled_from(world), max_size=1))):
        senders = tuple(r for r in world if r != to)
        at = draw(st.integers(0, len(happenings)))
        happenings.insert(
            at, PlannedOperation(senders=senders, receiver=to, tag=100 + n, any_source=True)
        )
    spots: list[Slowdown] = []
    if slow:
        spot = st.builds(
            Slowdown, rank=st.sampled_from(world), before_part=st.integers(0, len(happenings) - 1), seconds=st.floats(1, 5).map(lambda s: round(s, 1)),
            manner=st.sampled_from(("idle", "busy", "phase")),
        )  # fmt: skip
        spots = [
            replace(s, seconds=3 * s.seconds) if s.manner != "idle" else s
            for s in draw(st.lists(spot, max_size=3))
        ]
        spots = list({s.rank: s for s in spots}.values())
    return JobPlan(
        size=size, groups=tuple(groups), operations=tuple(happenings), hosts=draw(st.integers(1, min(3, size))),
        seed=draw(st.integers(0, 999)), eager=draw(st.booleans()), visible=draw(st.booleans()), slowdowns=tuple(spots),
    )  # fmt: skip


@st.composite
def draw_networks(draw: st.DrawFn) -> dict[tuple[str, int], HeartbeatDelivery]:
    """Some heartbeats are lost, late, unanswered, doubled, or overtaken by later ones."""
    fate = st.one_of(
        st.builds(HeartbeatDelivery, delay=st.sampled_from((0.1, 0.5, 1.0, 2.0))),
        st.just(HeartbeatDelivery(copies=0)),
        st.just(HeartbeatDelivery(reply_arrives=False)),
        st.just(HeartbeatDelivery(copies=2)),
        st.builds(HeartbeatDelivery, delay=st.sampled_from((5.2, 6.0, 7.0))),
    )
    spells = draw(
        st.lists(
            st.tuples(st.integers(0, 2), st.integers(1, 40), st.integers(1, 6), fate), max_size=4
        )
    )
    return {
        (f"node{host}", n): what
        for host, first, count, what in spells
        for n in range(first, first + count)
    }


terse_update_periods = st.sampled_from(
    (None, 2.5, 20.0)
)  # seconds for which hosts may omit the positions of progressing ranks


def run_and_diagnose(
    world: ModelCluster, seconds: float, on_verdicts: Callable[[list[Verdict]], None]
) -> None:
    """Advances time, with a diagnosis after each heartbeat and twice a second."""
    until = world.job.now + seconds
    n = 0
    while world.job.now < until:
        n += 1
        if world.run_step() or n % 5 == 0:
            on_verdicts([v for v in world.run_diagnosis().verdicts if v.is_confirmed])


def run_until_settled(
    world: ModelCluster, on_verdicts: Callable[[list[Verdict]], None], max_time_s: float = 120.0
) -> None:
    """Runs the job until its state can no longer change."""
    while not world.job.is_settled() and world.job.now < max_time_s:
        run_and_diagnose(world, 0.5, on_verdicts)
    assert world.job.now < max_time_s


def check_healthy_job(
    plan: JobPlan,
    fates: dict[tuple[str, int], HeartbeatDelivery],
    restarts: list[int],
    details_s: float | None,
) -> None:
    world = ModelCluster(
        plan.build_job(),
        LIMITS,
        fates,
        restarts=tuple(float(t) for t in restarts),
        details_s=details_s,
    )

    def is_not_reporting(verdict: Verdict) -> bool:
        """So many consecutive heartbeats were lost or late that the contract calls the host lost; or
        all were since the server restarted.
        """
        attempt = world.fleet.latest_attempt("job")
        assert attempt is not None
        culprits = [attempt.processes.get(r) for r in verdict.culprits]
        last_seen_times = [
            p.reports.last_seen_at if p is not None else attempt.opened_at for p in culprits
        ]
        is_unknown = (
            verdict.kind is VerdictKind.STARTUP_STALL and bool(restarts) and not any(culprits)
        )
        return (is_unknown or verdict.kind is VerdictKind.LOST_NODE) and all(
            world.now - last_seen_at >= LIMITS.stall_after_s for last_seen_at in last_seen_times
        )

    def check_verdicts(due: list[Verdict]) -> None:
        alerts = [v for v in due if v.severity is Severity.ALERT and not is_not_reporting(v)]
        assert not alerts, (
            f"at {world.now:.1f}: {alerts[0].kind} {alerts[0].culprits}: {alerts[0].summary}"
        )

    run_until_settled(world, check_verdicts)
    run_and_diagnose(world, 6.0, check_verdicts)
    assert all(r.exit is not None for r in world.job.ranks.values())


@example_settings(200)
@given(
    draw_plans(slow=True),
    draw_networks(),
    st.lists(st.integers(2, 20), max_size=1),
    terse_update_periods,
)
def test_healthy_job_opens_no_alert(
    plan: JobPlan,
    fates: dict[tuple[str, int], HeartbeatDelivery],
    restarts: list[int],
    details_s: float | None,
) -> None:
    note(f"{plan}\n{fates}\n{restarts}\n{details_s}")
    check_healthy_job(plan, fates, restarts, details_s)


def test_server_that_restarts_while_ranks_wait_opens_no_alert() -> None:
    """The others wait for rank 2 from the first second on. It is in a call that waits for rank 3 until
    second 6, and then computes for 4 seconds, in which the server restarts.
    """
    gather = PlannedOperation(group=0, op="gather", numel=32, root=2)
    message = replace(gather, op="", senders=(0,), receiver=2, is_async=True, awaited_after=3)
    slowdowns = (
        Slowdown(rank=3, before_part=1, seconds=6.0, manner="busy"),
        Slowdown(rank=2, before_part=2, seconds=4.0, manner="idle"),
    )
    plan = JobPlan(
        size=4,
        groups=((0, 1, 2, 3),),
        operations=(message, gather, replace(gather, op="all_reduce")),
        hosts=1,
        seed=530,
        eager=False,
        visible=True,
        slowdowns=slowdowns,
    )
    check_healthy_job(plan, {}, restarts=[9], details_s=None)


@dataclass(frozen=True)
class PlannedFault:
    """Rank ``rank`` goes wrong before its part ``at`` of the job, or in it."""

    manner: str
    rank: int
    before_part: int

    def build_job(self, plan: JobPlan, **how: Any) -> ModelJob:
        parts = {r: plan.program_parts(r) for r in range(plan.size)}
        mine = parts[self.rank]
        if self.manner == "skips":
            mine[self.before_part] = remove_event(mine[self.before_part], self.before_part - 1)
            mine[:] = [remove_event(part, self.before_part - 1) for part in mine]
        elif self.manner == "another call":
            mine[self.before_part] = [self._change_operation(i) for i in mine[self.before_part]]
        elif self.manner == "leaves":
            mine[self.before_part :] = [
                [
                    BeginLifecycle(Lifecycle.DESTROYED),
                    BeginLifecycle(Lifecycle.EXITING),
                    RunOwnCode(0.2),
                    EndProcess(status=0),
                ]
            ]
        else:
            mine.insert(self.before_part, [_FAULT_INSTRUCTIONS[self.manner]])
        return plan.build_job(parts, **how)

    def _change_operation(self, made: Instruction) -> Instruction:
        if not isinstance(made, EnterCall) or made.stream.kind is not StreamKind.COLLECTIVE:
            return made
        return replace(
            made,
            signature=make_signature("barrier" if made.signature.op != "barrier" else "all_reduce"),
        )


_FAULT_INSTRUCTIONS: dict[str, Instruction] = {
    "idles": RunOwnCode(FOREVER_S, stuck=True),
    "is killed": EndProcess(signal=9),
    "raises": EndProcess(status=1, exception_type="ValueError"),
    "is stopped": StopProcess(),
}
_EXPECTED_KINDS = {
    "idles": {VerdictKind.MISSING_RANK},
    "is killed": {VerdictKind.DEAD_RANK},
    "raises": {VerdictKind.DEAD_RANK},
    "is stopped": {VerdictKind.FROZEN_RANK},
    "leaves": {VerdictKind.EXITED_RANK},
    "another call": {VerdictKind.MISMATCH},
    "skips": {
        VerdictKind.MISMATCH,
        VerdictKind.DEADLOCK,
        VerdictKind.EXITED_RANK,
        VerdictKind.MISSING_RANK,
    },  # as it comes: what follows it may fit by chance
}


@st.composite
def draw_faulty_plans(draw: st.DrawFn) -> tuple[JobPlan, PlannedFault]:
    plan = draw(draw_plans())
    # A receive from any source does not show which of several absent senders it needs.
    plan = replace(plan, operations=tuple(h for h in plan.operations if not h.any_source))
    assume(plan.operations)
    how = draw(st.sampled_from(tuple(_EXPECTED_KINDS)))
    at = draw(st.integers(1, len(plan.operations) + (how not in ("skips", "another call"))))
    ranks = range(plan.size)
    if how in ("skips", "another call"):
        happening = plan.operations[at - 1]
        assume(not happening.senders)
        ranks = plan.groups[happening.group]  # type: ignore[assignment]
    return plan, PlannedFault(how, draw(st.sampled_from(ranks)), at)


@example_settings(200)
@given(draw_faulty_plans(), st.booleans(), st.booleans(), terse_update_periods)
def test_only_planted_fault_is_named(
    given_: tuple[JobPlan, PlannedFault],
    peers_raise: bool,
    launcher_kills: bool,
    details_s: float | None,
) -> None:
    plan, fault = given_
    note(f"{plan}\n{fault}\n{details_s}")
    world = ModelCluster(
        fault.build_job(plan, peers_raise=peers_raise, launcher_kills=launcher_kills),
        LIMITS,
        details_s=details_s,
    )
    kinds = _EXPECTED_KINDS[fault.manner]
    named: list[Verdict] = []

    def check_verdicts(due: list[Verdict]) -> None:
        for verdict in due:
            slow = (
                verdict.severity is Severity.WARNING
                and verdict.kind is VerdictKind.SLOW_RANK
                and VerdictKind.MISSING_RANK in kinds
            )
            assert fault.rank in verdict.culprits and (verdict.kind in kinds or slow), (
                f"at {world.now:.1f}: {verdict.kind} {verdict.culprits}: {verdict.summary}"
            )
            pair = fault.manner in ("skips", "another call") and len(plan.fault_group(fault)) == 2
            alone = not pair and verdict.kind is not VerdictKind.DEADLOCK
            assert not alone or verdict.culprits == (fault.rank,), (
                f"at {world.now:.1f}: {verdict.culprits}: {verdict.summary}"
            )
        named[:] = [v for v in due if v.severity is Severity.ALERT]

    run_until_settled(world, check_verdicts)
    waited_for = bool(world.job.find_needed_ranks()) or any(
        r.exit is not None and r.exit.has_failed for r in world.job.ranks.values()
    )
    run_and_diagnose(world, LIMITS.stall_after_s + SETTLE_S, check_verdicts)
    event(fault.manner if waited_for else "no rank waits")
    assert named or not waited_for, "no rank is named"
