"""A simulated distributed job: ranks, groups and channels, calls that complete as a backend's do,
and what may go wrong.

Time goes in steps of a tenth of a second. What really holds up each rank is known here
(`Job.needs`), so that a diagnosis made from heartbeats alone can be held against it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import TypeAlias

from hangwatch.model.calls import Call, Signature, Site, StreamKind
from hangwatch.model.groups import Group, pack_ranks, unpack_ranks
from hangwatch.model.operators import OPERATORS, MustMatch
from hangwatch.model.ranks import ExceptionInfo, ExitInfo, Lifecycle
from hangwatch.model.signatures import extend_chain, with_agreement_hash
from hangwatch.model.threads import Frame, ThreadStack

STEP = 0.1  # seconds
FOREVER = float("inf")
_AGREE = {spec.op: spec.must_match for spec in OPERATORS.values()}
_TORCH = "/usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py"


@dataclass(frozen=True, slots=True)
class Place:
    """One sequence of calls: a group's, a channel's, or that of the set-up."""

    kind: StreamKind
    group: Group
    peer: int | None = None
    tag: int | None = None


@dataclass(frozen=True, slots=True)
class Enter:
    """A rank makes a call; ``event`` names it for a later `Wait`."""

    place: Place
    signature: Signature
    event: int
    blocking: bool | None = True  # as the recorder tells it: None for a send or a receive
    free: bool = False  # the thread goes on at once


@dataclass(frozen=True, slots=True)
class Wait:
    event: int


@dataclass(frozen=True, slots=True)
class Work:
    """The rank's own code. ``busy`` uses the CPU; ``stuck`` is what a fault plants."""

    seconds: float
    busy: bool = False
    phase: str | None = None
    limit: float | None = None
    stuck: bool = False


@dataclass(frozen=True, slots=True)
class Begin:
    """A stage of its life: ``STARTING`` before torch is used."""

    lifecycle: Lifecycle


@dataclass(frozen=True, slots=True)
class Ends:
    status: int | None = None
    signal: int | None = None
    raised: str | None = None


@dataclass(frozen=True, slots=True)
class Stops:
    """SIGSTOP."""


Instruction: TypeAlias = Enter | Wait | Work | Begin | Ends | Stops


def signature(
    op: str,
    *,
    numel: int = 64,
    dtype: str = "float32",
    reduce_op: str | None = None,
    root: int | None = None,
) -> Signature:
    """As the recorder makes it for this operation."""
    made = Signature(
        op=op,
        shapes=((numel,),) if op != "barrier" else (),
        dtype=dtype,
        reduce_op=reduce_op,
        root=root,
        numel=numel,
    )
    return with_agreement_hash(made, _AGREE[op], (1, numel))


def setup(op: str, members: tuple[int, ...] | None = None) -> Signature:
    detail = None if members is None else f"ranks={pack_ranks(members)}"
    return with_agreement_hash(Signature(op=op, detail=detail), MustMatch.NOTHING, ())


@dataclass(slots=True)
class Made:
    """A call that was made."""

    signature: Signature
    at: float
    event: int
    blocking: bool | None
    order: int
    chain: int
    done: bool = False


@dataclass(slots=True)
class Rank:
    number: int
    host: str
    program: list[Instruction]
    at: int = 0  # index of the next instruction
    until: float = 0.0  # busy with its own code
    work: Work | None = None
    inside: tuple[Place, int] | None = None  # the call that its thread is blocked in
    waiting: bool = False  # in `Wait`, rather than in the call itself
    since: float = 0.0
    lifecycle: Lifecycle = Lifecycle.STARTING
    calls: dict[Place, list[Made]] = field(default_factory=dict)
    open: list[tuple[Place, int]] = field(default_factory=list)  # calls that are not complete
    ran_at: float = 0.0  # when its main thread last used the CPU
    stopped_at: float | None = None
    ended: ExitInfo | None = None
    ended_at: float = 0.0
    raised: ExceptionInfo | None = None
    raised_at: float = 0.0
    fails_at: float | None = None

    @property
    def acts(self) -> bool:
        return self.ended is None and self.stopped_at is None


@dataclass(slots=True)
class Job:
    """``eager``: a send, and a root's part of a one-sided collective, is over at once. ``visible``:
    making calls shows as CPU time.
    """

    programs: dict[int, list[Instruction]]
    hosts: dict[int, str]
    seed: int = 0
    eager: bool = True
    visible: bool = True
    mismatch_hangs: bool = True
    peers_raise: bool = False  # whoever waits for a dead rank fails soon
    launcher_kills: bool = False  # a second after the first failure
    nothing_moves: bool = False  # from now on no call completes
    now: float = 0.0
    ranks: dict[int, Rank] = field(default_factory=dict)
    _rng: Random = field(init=False)
    _orders: int = 0

    def __post_init__(self) -> None:
        self._rng = Random(self.seed)
        self.ranks = {r: Rank(r, self.hosts[r], list(p)) for r, p in self.programs.items()}

    # -- what happens
    # ------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        self.now += STEP
        order = list(self.ranks.values())
        self._rng.shuffle(order)
        moved = True
        while moved:
            moved = False
            for rank in order:
                while rank.acts and self._advance(rank):
                    moved = True
            moved |= self._complete()
        self._fail()

    def _advance(self, rank: Rank) -> bool:
        """Executes one instruction, if its thread is free to."""
        if rank.inside is not None:
            place, seq = rank.inside
            if not rank.calls[place][seq - 1].done:
                return False
            rank.inside = None
        if self.now < rank.until:
            if rank.work is not None and rank.work.busy:
                rank.ran_at = self.now
            return False
        rank.work = None
        if rank.at >= len(rank.program):
            return False
        instruction = rank.program[rank.at]
        rank.at += 1
        if self.visible:
            rank.ran_at = self.now
        if isinstance(instruction, Enter):
            self._enter(rank, instruction)
        elif isinstance(instruction, Wait):
            self._wait(rank, instruction.event)
        elif isinstance(instruction, Work):
            rank.work, rank.until, rank.since = (
                instruction,
                self.now + instruction.seconds,
                self.now,
            )
            rank.ran_at = self.now
        elif isinstance(instruction, Begin):
            rank.lifecycle = instruction.lifecycle
        elif isinstance(instruction, Stops):
            rank.stopped_at = self.now
        else:
            self.end(rank, instruction)
        return True

    def _enter(self, rank: Rank, made: Enter) -> None:
        calls = rank.calls.setdefault(made.place, [])
        before = calls[-1].chain if calls else 0
        self._orders += 1
        calls.append(
            Made(
                made.signature,
                self.now,
                made.event,
                made.blocking,
                self._orders,
                extend_chain(before, made.signature.agree),
            )
        )
        rank.open.append((made.place, len(calls)))
        if not made.free:
            rank.inside, rank.waiting, rank.since = (
                (made.place, len(calls)),
                made.blocking is None,
                self.now,
            )

    def _wait(self, rank: Rank, event: int) -> None:
        for place, calls in rank.calls.items():
            for seq, made in enumerate(calls, 1):
                if made.event == event and not made.done:
                    rank.inside, rank.waiting, rank.since = (place, seq), True, self.now

    def end(self, rank: Rank, how: Ends) -> None:
        rank.ended, rank.ended_at = ExitInfo(exit_status=how.status, signal=how.signal), self.now
        rank.inside = rank.work = None
        if how.raised is not None:
            rank.raised, rank.raised_at = (
                ExceptionInfo(type=how.raised, message="", site=None),
                self.now,
            )

    def _complete(self) -> bool:
        some = False
        if self.nothing_moves:
            return False
        for rank in self.ranks.values():
            done = [
                at
                for at in rank.open
                if rank.acts and self._in_turn(rank, *at) and not self.unmet(rank.number, *at)[0]
            ]
            for place, seq in done:
                rank.calls[place][seq - 1].done = some = True
                rank.open.remove((place, seq))
        return some

    def _in_turn(self, rank: Rank, place: Place, seq: int) -> bool:
        """A backend completes the collectives of a group in order."""
        return (
            place.kind is not StreamKind.COLLECTIVE or seq == 1 or rank.calls[place][seq - 2].done
        )

    def _fail(self) -> None:
        """What deaths lead to."""
        dead = [r for r in self.ranks.values() if r.ended is not None]
        failed = [r for r in dead if r.ended is not None and r.ended.has_failed]
        for rank in self.ranks.values():
            if not rank.acts:
                continue
            if self.peers_raise and rank.inside is not None and rank.fails_at is None:
                on = self.unmet(rank.number, *rank.inside)[0]
                if any(self.ranks[o].ended is not None for o in on):
                    rank.fails_at = self.now + 0.2 + 0.3 * self._rng.random()
            if rank.fails_at is not None and self.now >= rank.fails_at:
                self.end(rank, Ends(status=1, raised="RuntimeError"))
            elif (
                self.launcher_kills and failed and self.now >= min(r.ended_at for r in failed) + 1.0
            ):
                self.end(rank, Ends(signal=int(signal.SIGTERM)))

    # -- the truth
    # ---------------------------------------------------------------------------------------------------------

    def unmet(self, rank: int, place: Place, seq: int) -> tuple[set[int], bool]:
        """The ranks without which this call cannot complete, and whether any one of them would do."""
        if place.kind in (StreamKind.SEND, StreamKind.RECV):
            return self._unmet_channel(rank, place, seq)
        members = set(place.group.ranks)
        made = self.ranks[rank].calls[place][seq - 1].signature
        if place.kind is StreamKind.SETUP:
            concerned = _members(made)
            members = members if concerned is None else concerned if rank in concerned else set()
        else:
            members = _needed(made, place.group, rank, self.eager)
        late = set()
        for member in members - {rank}:
            calls = self.ranks[member].calls.get(place, []) if member in self.ranks else []
            theirs = calls[seq - 1] if len(calls) >= seq else None
            gone = theirs is not None and not theirs.done and not self.ranks[member].acts
            if (
                theirs is None
                or gone
                or (self.mismatch_hangs and theirs.signature.agree != made.agree)
            ):
                late.add(member)
        return late, False

    def _unmet_channel(self, rank: int, place: Place, seq: int) -> tuple[set[int], bool]:
        group, tag = place.group, place.tag
        if place.kind is StreamKind.SEND:
            assert place.peer is not None
            if self.eager:
                return set(), False
            taken = self._made(place.peer, Place(StreamKind.RECV, group, rank, tag))
            anybody = len(self._made(place.peer, Place(StreamKind.RECV, group, -1, tag)))
            mine = self.ranks[rank].calls[place][seq - 1].order
            ahead = sum(m.order < mine for _, m in self._sent(place.peer, group, tag))
            return (set() if len(taken) >= seq or ahead < anybody else {place.peer}), False
        if place.peer == -1:
            enough = len(list(self._sent(rank, group, tag))) >= seq
            return (set() if enough else set(group.ranks) - {rank}), True
        sent = self._made(
            place.peer if place.peer is not None else -1, Place(StreamKind.SEND, group, rank, tag)
        )
        return (set() if len(sent) >= seq else {place.peer or 0}), False

    def _made(self, rank: int, place: Place) -> list[Made]:
        return self.ranks[rank].calls.get(place, []) if rank in self.ranks else []

    def _sent(self, to: int, group: Group, tag: int | None) -> Iterator[tuple[int, Made]]:
        for rank in self.ranks:
            for made in self._made(rank, Place(StreamKind.SEND, group, to, tag)):
                yield rank, made

    def needs(self) -> dict[int, tuple[set[int], bool]]:
        """Per rank whose thread is blocked: whom it waits for, and whether any one of them would
        do.
        """
        return {
            r.number: self.unmet(r.number, *r.inside)
            for r in self.ranks.values()
            if r.acts and r.inside is not None
        }

    def quiet(self) -> bool:
        """Nothing will ever happen again by itself."""
        return all(
            not r.acts
            or r.inside is not None
            or (r.work is not None and r.until == FOREVER)
            or r.at >= len(r.program)
            for r in self.ranks.values()
        ) and not any(r.fails_at is not None and r.acts for r in self.ranks.values())

    # -- what can be seen of it
    # --------------------------------------------------------------------------------------------

    def stack(self, rank: int) -> ThreadStack:
        """The main thread's, as py-spy shows it."""
        held = self.ranks[rank]
        user = Frame(function="train", file="/home/me/train.py", line=20, text="loss = step(batch)")
        if held.inside is not None:
            place, seq = held.inside
            wait = Frame(
                function="wait" if held.waiting else held.calls[place][seq - 1].signature.op,
                file=_TORCH,
                line=9,
            )
            return ThreadStack(thread="MainThread", main=True, frames=(wait, user))
        turn = int(self.now * 10) % 7 if held.work is not None and held.work.busy else 0
        inner = Frame(
            function=f"work{turn}",
            file="/home/me/data.py",
            line=30 + turn,
            text="batch = queue.get()",
        )
        return ThreadStack(thread="MainThread", main=True, frames=(inner, user))

    def recorded(self, rank: int, place: Place, first: int = 1) -> list[Call]:
        site = Site(file="/home/me/train.py", line=20, function="train")
        return [
            Call(
                seq=seq, signature=m.signature, site=site, chain=m.chain, entered_s=self.now - m.at, blocking=m.blocking,
                duration_s=0.01 if m.done else None,
            )
            for seq, m in enumerate(self.ranks[rank].calls[place], 1)
            if seq >= first
        ]  # fmt: skip


def _members(made: Signature) -> set[int] | None:
    return None if made.detail is None else set(unpack_ranks(made.detail.removeprefix("ranks=")))


def _needed(made: Signature, group: Group, rank: int, eager: bool) -> set[int]:
    """The members without which a collective does not end on ``rank``."""
    root = None if made.root is None else group.ranks[made.root % len(group.ranks)]
    if made.op in ("broadcast", "scatter"):
        if rank != root:
            return {root} if root is not None else set()
        return set() if eager else set(group.ranks)
    if made.op in ("reduce", "gather") and rank != root:
        return set() if eager or root is None else {root}
    return set(group.ranks)


def without(program: list[Instruction], event: int) -> list[Instruction]:
    return [i for i in program if not (isinstance(i, (Enter, Wait)) and i.event == event)]


def changed(program: list[Instruction], event: int, made: Signature) -> list[Instruction]:
    return [
        replace(i, signature=made) if isinstance(i, Enter) and i.event == event else i
        for i in program
    ]
