"""Of any job: what was planted is named and only it, and a healthy one is left alone, however
heartbeats come.

``HANGWATCH_EXAMPLES=2000 pytest tests/unit/diagnosis/test_properties.py`` looks at thousands of
jobs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from hypothesis import HealthCheck, assume, event, given, note, settings
from hypothesis import strategies as st

from hangwatch.model.calls import Signature, StreamKind
from hangwatch.model.groups import Group
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.limits import Limits
from hangwatch.model.ranks import Lifecycle
from hangwatch.model.verdicts import Verdict
from tests.unit.model import (
    FOREVER,
    Begin,
    Ends,
    Enter,
    Instruction,
    Job,
    Place,
    Stops,
    Wait,
    Work,
    setup,
    signature,
    without,
)
from tests.unit.model_wire import Fate, World

EXAMPLES = int(os.environ.get("HANGWATCH_EXAMPLES", "0"))  # jobs for each property


def jobs(most: int) -> settings:
    """``most`` jobs, always the same ones; or as many as asked for, drawn anew."""
    return settings(
        max_examples=EXAMPLES or most, derandomize=not EXAMPLES, deadline=None, database=None, print_blob=False,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


LIMITS = Limits(stall_after_s=8.0, slow_limit_s=40.0)
SETTLES = 5.0  # seconds by which a verdict may be later than it is due
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
FULL = (
    "all_reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
)  # nobody leaves before all are there
SETUP = Group(name="setup", desc="set-up", ranks=())


@dataclass(frozen=True)
class Happening:
    """What some ranks do together: a collective of ``group``, or messages from ``senders`` to
    ``to``.
    """

    group: int = 0
    op: str = ""
    numel: int = 64
    root: int = 0
    senders: tuple[int, ...] = ()
    to: int = 0
    tag: int = 0
    any_source: bool = False
    free: bool = False  # asynchronous, and waited for ...
    later: int = 0  # ... so many happenings later


@dataclass(frozen=True)
class Slow:
    rank: int
    at: int
    seconds: float
    how: str


@dataclass(frozen=True)
class Plan:
    """A healthy job. One order of all its happenings, of which each rank has its part: so it cannot
    deadlock.
    """

    size: int
    groups: tuple[tuple[int, ...], ...]
    happenings: tuple[Happening, ...]
    hosts: int = 1
    seed: int = 0
    eager: bool = True
    visible: bool = True
    slow: tuple[Slow, ...] = ()

    def group(self, index: int) -> Group:
        return Group(
            name=str(index), desc=f"group{index}", ranks=self.groups[index], backend="gloo"
        )

    def place(self, happening: Happening) -> Place:
        return Place(StreamKind.COLLECTIVE, self.group(happening.group))

    def group_of(self, fault: Fault) -> tuple[int, ...]:
        return self.groups[self.happenings[fault.at - 1].group]

    def setup(self) -> Place:
        return Place(StreamKind.SETUP, replace(SETUP, ranks=tuple(range(self.size))))

    def members(self, happening: Happening) -> set[int]:
        return (
            {*happening.senders, happening.to}
            if happening.senders
            else set(self.groups[happening.group])
        )

    def parts(self, rank: int) -> list[list[Instruction]]:
        """A rank's program: what it does before, in each happening, and after them."""
        begin: list[Instruction] = [
            Work(0.3), Begin(Lifecycle.INITIALISING), Enter(self.setup(), setup("init_process_group"), -1), Begin(Lifecycle.INITIALISED),
        ]  # fmt: skip
        begin += [
            Enter(self.setup(), setup("new_group", ranks), -2 - n)
            for n, ranks in enumerate(self.groups[1:])
        ]
        parts: list[list[Instruction]] = [begin]
        pending: list[tuple[int, int]] = []
        for n, happening in enumerate(self.happenings):
            part: list[Instruction] = [Wait(e) for due, e in pending if due <= n]
            pending = [(due, e) for due, e in pending if due > n]
            part += [
                Work(
                    s.seconds,
                    busy=s.how == "busy",
                    phase="save" if s.how == "phase" else None,
                    limit=60.0 if s.how == "phase" else None,
                )
                for s in self.slow
                if (s.rank, s.at) == (rank, n)
            ]
            if rank in self.members(happening):
                part += [
                    Work(0.1 * ((self.seed * 7919 + rank * 31 + n * 17) % 4)),
                    *self.does(rank, n, happening),
                ]
                if happening.free:
                    pending.append((n + happening.later, n))
            parts.append(part)
        end: list[Instruction] = [Wait(e) for _, e in pending]
        parts.append(
            [*end, Begin(Lifecycle.DESTROYED), Begin(Lifecycle.EXITING), Work(0.2), Ends(status=0)]
        )
        return parts

    def does(self, rank: int, n: int, happening: Happening) -> list[Instruction]:
        free = happening.free
        if not happening.senders:
            return [Enter(self.place(happening), self.signed(happening), n, not free, free)]
        world = self.group(0)
        if rank != happening.to:
            sent = Place(StreamKind.SEND, world, happening.to, happening.tag)
            return [Enter(sent, signature("send", numel=happening.numel), n, None, free)]
        froms = (-1,) * len(happening.senders) if happening.any_source else happening.senders
        made = signature(
            "recv_any_source" if happening.any_source else "recv", numel=happening.numel
        )
        return [
            Enter(Place(StreamKind.RECV, world, peer, happening.tag), made, n, None, free)
            for peer in froms
        ]

    def signed(self, happening: Happening) -> Signature:
        op = happening.op
        rooted, reduced = (
            op in ("broadcast", "reduce", "scatter", "gather"),
            op in ("all_reduce", "reduce", "reduce_scatter_tensor"),
        )
        root = happening.root % len(self.groups[happening.group]) if rooted else None
        return signature(op, numel=happening.numel, reduce_op="sum" if reduced else None, root=root)

    def job(self, parts: dict[int, list[list[Instruction]]] | None = None, **how: bool) -> Job:
        parts = parts or {r: self.parts(r) for r in range(self.size)}
        programs = {r: [i for part in p for i in part] for r, p in parts.items()}
        hosts = {r: f"node{r * self.hosts // self.size}" for r in range(self.size)}
        return Job(programs, hosts, seed=self.seed, eager=self.eager, visible=self.visible, **how)


@st.composite
def plans(draw: st.DrawFn, slow: bool = False, least: int = 1) -> Plan:
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
        Happening,
        group=st.integers(0, len(groups) - 1),
        op=st.sampled_from(COLLECTIVES),
        numel=st.sampled_from((64, 32)),
        root=st.integers(0, 7),
        free=st.booleans(),
        later=st.integers(1, 4),
    )
    pair = st.lists(st.sampled_from(world), min_size=2, max_size=2, unique=True)
    message = st.builds(
        lambda ends, **rest: Happening(senders=(ends[0],), to=ends[1], **rest),
        pair, tag=st.integers(0, 1), free=st.booleans(), later=st.integers(1, 4),
    )  # fmt: skip
    happenings = draw(st.lists(st.one_of(collective, message), min_size=least, max_size=14))
    for n, to in enumerate(draw(st.lists(st.sampled_from(world), max_size=1))):
        senders = tuple(r for r in world if r != to)
        at = draw(st.integers(0, len(happenings)))
        happenings.insert(at, Happening(senders=senders, to=to, tag=100 + n, any_source=True))
    spots: list[Slow] = []
    if slow:
        spot = st.builds(
            Slow, rank=st.sampled_from(world), at=st.integers(0, len(happenings) - 1), seconds=st.floats(1, 5).map(lambda s: round(s, 1)),
            how=st.sampled_from(("idle", "busy", "phase")),
        )  # fmt: skip
        spots = [
            replace(s, seconds=3 * s.seconds) if s.how != "idle" else s
            for s in draw(st.lists(spot, max_size=3))
        ]
        spots = list({s.rank: s for s in spots}.values())
    return Plan(
        size=size, groups=tuple(groups), happenings=tuple(happenings), hosts=draw(st.integers(1, min(3, size))),
        seed=draw(st.integers(0, 999)), eager=draw(st.booleans()), visible=draw(st.booleans()), slow=tuple(spots),
    )  # fmt: skip


@st.composite
def networks(draw: st.DrawFn) -> dict[tuple[str, int], Fate]:
    """Heartbeats of which some are lost, late, unanswered, doubled, or overtaken by later ones."""
    fate = st.one_of(
        st.builds(Fate, delay=st.sampled_from((0.1, 0.5, 1.0, 2.0))),
        st.just(Fate(copies=0)),
        st.just(Fate(answered=False)),
        st.just(Fate(copies=2)),
        st.builds(Fate, delay=st.sampled_from((5.2, 6.0, 7.0))),
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


seldom = st.sampled_from(
    (None, 2.5, 20.0)
)  # seconds for which hosts need not tell where their ranks are while they get on


def watch(world: World, seconds: float, see: Callable[[list[Verdict]], None]) -> None:
    """Lets time pass, with a diagnosis whenever something was heard, and twice a second."""
    until = world.job.now + seconds
    n = 0
    while world.job.now < until:
        n += 1
        if world.step() or n % 5 == 0:
            see([v for v in world.diagnose().verdicts if v.is_confirmed])


def run_out(world: World, see: Callable[[list[Verdict]], None], most: float = 120.0) -> None:
    """Until nothing more happens."""
    while not world.job.quiet() and world.job.now < most:
        watch(world, 0.5, see)
    assert world.job.now < most


@jobs(300)
@given(plans(slow=True), networks(), st.lists(st.integers(2, 20), max_size=1), seldom)
def test_a_healthy_job_opens_no_alert(
    plan: Plan, fates: dict[tuple[str, int], Fate], restarts: list[int], details_s: float | None
) -> None:
    note(f"{plan}\n{fates}\n{restarts}\n{details_s}")
    world = World(
        plan.job(), LIMITS, fates, restarts=tuple(float(t) for t in restarts), details_s=details_s
    )

    def unheard(verdict: Verdict) -> bool:
        """So many heartbeats in a row were lost or late that, by the contract, the host is; or
        since the server began anew, all were.
        """
        attempt = world.fleet.latest_attempt("job")
        assert attempt is not None
        held = [attempt.processes.get(r) for r in verdict.culprits]
        heard = [p.last_seen_at if p is not None else attempt.opened_at for p in held]
        unknown = verdict.kind is VerdictKind.STARTUP_STALL and bool(restarts) and not any(held)
        return (unknown or verdict.kind is VerdictKind.LOST_NODE) and all(
            world.now - at >= LIMITS.stall_after_s for at in heard
        )

    def see(due: list[Verdict]) -> None:
        alerts = [v for v in due if v.severity is Severity.ALERT and not unheard(v)]
        assert not alerts, (
            f"at {world.now:.1f}: {alerts[0].kind} {alerts[0].culprits}: {alerts[0].summary}"
        )

    run_out(world, see)
    watch(world, 6.0, see)
    assert all(r.ended is not None for r in world.job.ranks.values())


@dataclass(frozen=True)
class Fault:
    """Rank ``rank`` goes wrong before its part ``at`` of the job, or in it."""

    how: str
    rank: int
    at: int

    def plant(self, plan: Plan, **how: bool) -> Job:
        parts = {r: plan.parts(r) for r in range(plan.size)}
        mine = parts[self.rank]
        if self.how == "skips":
            mine[self.at] = without(mine[self.at], self.at - 1)
            mine[:] = [without(part, self.at - 1) for part in mine]
        elif self.how == "another call":
            mine[self.at] = [self._another(i) for i in mine[self.at]]
        elif self.how == "leaves":
            mine[self.at :] = [
                [Begin(Lifecycle.DESTROYED), Begin(Lifecycle.EXITING), Work(0.2), Ends(status=0)]
            ]
        else:
            mine.insert(self.at, [_DONE[self.how]])
        return plan.job(parts, **how)

    def _another(self, made: Instruction) -> Instruction:
        if not isinstance(made, Enter) or made.place.kind is not StreamKind.COLLECTIVE:
            return made
        return replace(
            made, signature=signature("barrier" if made.signature.op != "barrier" else "all_reduce")
        )


_DONE: dict[str, Instruction] = {
    "idles": Work(FOREVER, stuck=True),
    "is killed": Ends(signal=9),
    "raises": Ends(status=1, raised="ValueError"),
    "is stopped": Stops(),
}
_KINDS = {
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
_DEADLY = ("is killed", "raises")


@st.composite
def faulty(draw: st.DrawFn) -> tuple[Plan, Fault]:
    plan = draw(plans())
    # Of a receive from any source nobody can say for want of whom it fails, and which of several
    # absent senders it wants.
    plan = replace(plan, happenings=tuple(h for h in plan.happenings if not h.any_source))
    assume(plan.happenings)
    how = draw(st.sampled_from(tuple(_KINDS)))
    at = draw(st.integers(1, len(plan.happenings) + (how not in ("skips", "another call"))))
    ranks = range(plan.size)
    if how in ("skips", "another call"):
        happening = plan.happenings[at - 1]
        assume(not happening.senders)
        ranks = plan.groups[happening.group]  # type: ignore[assignment]
    return plan, Fault(how, draw(st.sampled_from(ranks)), at)


@jobs(300)
@given(faulty(), st.booleans(), st.booleans(), seldom)
def test_what_is_planted_is_named_and_only_it(
    given_: tuple[Plan, Fault], peers_raise: bool, launcher_kills: bool, details_s: float | None
) -> None:
    plan, fault = given_
    note(f"{plan}\n{fault}\n{details_s}")
    world = World(
        fault.plant(plan, peers_raise=peers_raise, launcher_kills=launcher_kills),
        LIMITS,
        details_s=details_s,
    )
    kinds = _KINDS[fault.how]
    named: list[Verdict] = []

    def see(due: list[Verdict]) -> None:
        for verdict in due:
            slow = (
                verdict.severity is Severity.WARNING
                and verdict.kind is VerdictKind.SLOW_RANK
                and VerdictKind.MISSING_RANK in kinds
            )
            assert fault.rank in verdict.culprits and (verdict.kind in kinds or slow), (
                f"at {world.now:.1f}: {verdict.kind} {verdict.culprits}: {verdict.summary}"
            )
            pair = fault.how in ("skips", "another call") and len(plan.group_of(fault)) == 2
            alone = not pair and verdict.kind is not VerdictKind.DEADLOCK
            assert not alone or verdict.culprits == (fault.rank,), (
                f"at {world.now:.1f}: {verdict.culprits}: {verdict.summary}"
            )
        named[:] = [v for v in due if v.severity is Severity.ALERT]

    run_out(world, see)
    waited_for = bool(world.job.needs()) or any(
        r.ended is not None and r.ended.has_failed for r in world.job.ranks.values()
    )
    watch(world, LIMITS.stall_after_s + SETTLES, see)
    event(fault.how if waited_for else "nobody minds")
    assert named or not waited_for, "nobody is named"
