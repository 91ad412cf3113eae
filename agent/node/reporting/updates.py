"""From what is known of a process and what the server has acknowledged to what it must still be
told. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hangwatch.model.calls import Call, Site
from hangwatch.model.groups import pack_ranks
from hangwatch.model.ranks import ExceptionInfo, ExitInfo
from hangwatch.protocol.heartbeat import (
    MAX_CHECKPOINTS,
    ProcessIdentity,
    ProcessUpdate,
    StreamIdentity,
    StreamUpdate,
)
from hangwatch.ring.snapshot import RingDelta, RingSnapshot, StreamState

from .check_updates import CheckHistory

REFRESH_S = 1.0  # how often a pulse is told that only went on
STANDS_S = 0.5  # a call unfinished for so long is worth its arguments
STANDING = 8  # of them at most a sequence
_STEP = 4  # its place in a word
_KEPT = 256  # running hashes a sequence, until they are acknowledged

Fetch = Callable[[int, int, int], "list[Call]"]  # (uid, from_seq, most): calls, oldest first


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """All that is known of one process at one moment. Times are ages in seconds."""

    key: str
    identity: ProcessIdentity
    snapshot: RingSnapshot | None = None
    state: str = "?"
    idle_s: float = 0.0
    cpu_s: float = 0.0
    ended: ExitInfo | None = None
    ended_s: float = 0.0
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceTold:
    entered: int = -1
    completed: int | None = None
    pending: bool = False
    checked: int = 0  # the last call whose running hash was within a told range
    stood: int = 0  # the last unfinished call that was told
    shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the server has acknowledged of one process."""

    identity: ProcessIdentity | None = None
    word: tuple[Any, ...] = ()
    at_ns: int = 0
    alive_ns: int = 0  # latest sign of life in it
    sequences: Mapping[int, SequenceTold] = field(default_factory=dict)
    checks: int = 0  # entries of the table of checks

    @property
    def end(self) -> bool:
        """The end of the process is among it."""
        return bool(self.word) and self.word[0] is not None


@dataclass(slots=True)
class History:
    """Running hashes that the server has not acknowledged, by sequence: thinned, not cut, when it
    is away for long.
    """

    cursor: int = 0  # records taken in
    chains: dict[int, dict[int, int]] = field(default_factory=dict)
    ops: dict[int, str] = field(default_factory=dict)
    shared: dict[int, int] = field(
        default_factory=dict
    )  # the first call that two threads made at once
    checks: CheckHistory = field(default_factory=CheckHistory)

    def take(self, news: RingDelta) -> None:
        self.cursor = news.next_index
        self.ops.update(news.newest_ops)
        self.shared = news.first_concurrent | self.shared
        for uid, fresh in news.chains.items():
            held = self.chains.setdefault(uid, {})
            held.update(fresh)
            step = 1
            while len(held) > _KEPT:
                step *= 2
                held = {seq: chain for seq, chain in held.items() if seq % step == 0}
            self.chains[uid] = held

    def acknowledged(self, told: Told) -> None:
        self.checks.acknowledged(told.checks)
        for uid, sequence in told.sequences.items():
            if held := self.chains.get(uid):
                self.chains[uid] = {
                    seq: chain for seq, chain in held.items() if seq > sequence.checked
                }

    def rewind(self) -> None:
        """Starts anew with what the ring still has."""
        self.cursor = 0
        self.chains.clear()
        self.checks.rewind()


def checkpoints(chains: Mapping[int, int], after: int, upto: int) -> tuple[tuple[int, int], ...]:
    """Running hashes at multiples of the smallest power of two that has at most `CHECKPOINTS` in
    ``(after, upto]``.

    >>> checkpoints({seq: -seq for seq in range(101, 118)}, after=100, upto=117)
    ((104, -104), (108, -108), (112, -112), (116, -116))
    """
    step = 1
    while upto // step - after // step > MAX_CHECKPOINTS:
        step *= 2
    first = (after // step + 1) * step
    return tuple((seq, chains[seq]) for seq in range(first, upto + 1, step) if seq in chains)


def compose(
    view: View,
    told: Told | None,
    history: History,
    now_ns: int,
    fetch: Fetch,
    tails: Mapping[int, list[Call]],
) -> tuple[ProcessUpdate | None, Told]:
    """The update that is due, if any, and what will have been told once it is acknowledged.

    ``tails`` are the last calls of every sequence of a process that has ended.
    """
    before = told or Told()
    sequences: list[StreamUpdate] = []
    after = dict(before.sequences)
    for state in view.snapshot.streams if view.snapshot else ():
        ending = tails.get(state.uid, []) if view.ended and not before.end else None
        update, after[state.uid] = _sequence(
            state, before.sequences.get(state.uid), history, fetch, ending
        )
        if update is not None:
            sequences.append(update)
    word = _word(view, now_ns)
    alive_ns = now_ns - int(
        1e9 * min(view.idle_s, (view.snapshot and view.snapshot.pulse_s) or view.idle_s)
    )
    lived = alive_ns > before.alive_ns + 1_000_000 and now_ns - before.at_ns >= REFRESH_S * 1e9
    known = before.identity is not None and same(view.identity, before.identity)
    found, checks = history.checks.due(before.checks, now_ns)
    if (
        known
        and not found
        and not sequences
        and word == before.word
        and not (lived and view.ended is None)
    ):
        return None, before
    return (
        replace(_update(view, known, tuple(sequences), now_ns), **found),
        Told(
            identity=view.identity,
            word=word,
            at_ns=now_ns,
            alive_ns=alive_ns,
            sequences=after,
            checks=checks,
        ),
    )


def _word(view: View, now_ns: int) -> tuple[Any, ...]:
    """What of a process is told as soon as it changes. Running and sleeping are one: they alternate
    all the time.
    """
    ring = view.snapshot
    state = "S" if view.state in "RSI" else view.state
    if ring is None:
        return (view.ended, state, view.faults)
    began_ms = round((now_ns / 1e9 - ring.phase_s) * 1e3) if ring.phase else 0
    words = None if ring.exception is None else str(ring.exception)
    return (
        view.ended, state, view.faults, ring.lifecycle, ring.step, ring.phase, began_ms, ring.phase_limit_s,
        ring.dropped, ring.faults, words,
    )  # fmt: skip


def but_for_steps(word: tuple[Any, ...]) -> tuple[Any, ...]:
    return word[:_STEP] + word[_STEP + 1 :]


def _update(
    view: View, known: bool, sequences: tuple[StreamUpdate, ...], now_ns: int
) -> ProcessUpdate:
    ring = view.snapshot
    update = ProcessUpdate(
        key=view.key,
        identity=None if known else view.identity,
        state=view.state,
        idle_s=round(view.idle_s, 3),
        cpu_s=view.cpu_s,
        ended=view.ended,
        ended_s=view.ended_s,
        faults=view.faults,
    )
    if ring is None:
        return update
    return replace(
        update,
        lifecycle=ring.lifecycle,
        step=ring.step,
        phase=ring.phase,
        phase_s=ring.phase_s if ring.phase else 0.0,
        phase_limit_s=ring.phase_limit_s,
        pulse_s=round(ring.pulse_s, 4) or None,  # 0: its recorder has not run yet
        raised=(raised := read_raised(ring.exception)),
        raised_s=_raised_s(ring.exception, now_ns) if raised else 0.0,
        dropped=ring.dropped,
        faults=view.faults + ring.faults,
        sequences=sequences,
    )


def _sequence(
    state: StreamState,
    told: SequenceTold | None,
    history: History,
    fetch: Fetch,
    ending: list[Call] | None,
) -> tuple[StreamUpdate | None, SequenceTold]:
    before = told or SequenceTold()
    chains = history.chains.get(state.uid, {})
    # A call's record may be seen before its sequence counts it, and the other way round: what is
    # missing comes next time.
    upto = min(state.entered, max(chains, default=0))
    after = max(before.checked, min(chains, default=1) - 1)
    standing, stood = (
        (ending, state.entered) if ending is not None else _standing(state, before, fetch)
    )
    shared = () if before.shared else _shared(state, history, fetch)
    compared = state.peer is None  # what one rank sends, another need not
    moved = (state.entered, state.completed, state.pending_s is not None) != (
        before.entered,
        before.completed,
        before.pending,
    )
    known = SequenceTold(
        entered=state.entered,
        completed=state.completed,
        pending=state.pending_s is not None,
        checked=max(before.checked, upto),
        stood=stood,
        shared=before.shared or bool(shared),
    )
    if told is not None and not moved and not standing and not shared and upto <= before.checked:
        return None, known
    update = StreamUpdate(
        uid=state.uid,
        identity=None if told is not None else _identity(state),
        entered=state.entered,
        completed=state.completed,
        chain=state.chain if compared else 0,
        op=history.ops.get(state.uid, ""),
        entered_s=round(state.entered_s, 4),
        pending_s=None if state.pending_s is None else round(state.pending_s, 4),
        checkpoints=checkpoints(chains, after, upto) if compared else (),
        calls=tuple(standing),
        shared=shared,
    )
    return update, known


def _shared(state: StreamState, history: History, fetch: Fetch) -> tuple[Call, ...]:
    """The first call that two threads made at once, after the other thread's last; empty where
    there is none.
    """
    seq = history.shared.get(state.uid)
    if seq is None:
        return ()
    calls = [
        call for call in fetch(state.uid, max(1, seq - STANDING), history.cursor) if call.seq <= seq
    ]
    before = [call for call in calls if call.thread != calls[-1].thread]
    return (before[-1], calls[-1]) if before and calls[-1].seq == seq else ()


def _standing(state: StreamState, before: SequenceTold, fetch: Fetch) -> tuple[list[Call], int]:
    """The oldest unfinished calls, once they stand: those not told yet. Where completion is
    unknown, the newest call.

    Also up to which call they were looked for: those that the ring has lost are not looked for
    again.
    """
    if not stands(state):
        return [], before.stood
    oldest = state.entered if state.completed is None else state.completed + 1
    first, last = max(oldest, before.stood + 1), min(state.entered, oldest + STANDING - 1)
    if first > last:
        return [], before.stood
    found = fetch(state.uid, first, state.entered - first + 1)
    return [call for call in found if first <= call.seq <= last], last


def stands(state: StreamState) -> bool:
    """A call of it has been unfinished for a while; where completion is unknown, the newest may be."""
    unfinished = state.completed is None or state.completed < state.entered
    return (
        unfinished and (state.entered_s if state.pending_s is None else state.pending_s) >= STANDS_S
    )


def _identity(state: StreamState) -> StreamIdentity:
    return StreamIdentity(
        kind=state.kind,
        name=state.group.name,
        desc=state.group.desc,
        ranks=pack_ranks(state.group.ranks),
        backend=state.group.backend,
        generation=state.group.generation,
        world=state.group.world_size,
        peer=state.peer,
        tag=state.tag,
    )


def same(one: ProcessIdentity, other: ProcessIdentity) -> bool:
    """Equal but for its age, which passes."""
    return one is other or replace(one, started_s=0.0) == replace(other, started_s=0.0)


def read_raised(told: Mapping[str, Any] | None) -> ExceptionInfo | None:
    """A ring's last words, as far as they make sense."""
    if not told or not told.get("type"):
        return None
    site = None
    if told.get("file"):
        try:
            site = Site(
                file=str(told["file"]),
                line=int(told.get("line", 0)),
                function=str(told.get("function", "?")),
            )
        except (TypeError, ValueError):
            site = None
    return ExceptionInfo(type=str(told["type"]), message=str(told.get("message", "")), site=site)


def _raised_s(told: Mapping[str, Any] | None, now_ns: int) -> float:
    at_ns = (told or {}).get("at_ns")
    return max(0, now_ns - at_ns) / 1e9 if isinstance(at_ns, int) else 0.0


def read_identity(told: Mapping[str, Any], *, pid: int, start_ticks: int) -> ProcessIdentity | None:
    """Who a ring says its process is, but for its age; None while it does not know its rank. Raises
    ValueError for nonsense.
    """
    if told.get("rank") is None:
        return None
    try:
        local = told.get("local_rank")
        return ProcessIdentity(
            job=str(told["job"]),
            restart=int(told.get("restart", 0)),
            rank=int(told["rank"]),
            world_size=int(told.get("world_size", 0)),
            local_rank=None if local is None else int(local),
            pid=pid,
            start_ticks=start_ticks,
            python=str(told.get("python", "")),
            torch=str(told.get("torch", "")),
            program=str(told.get("program", "")),
            master=str(told.get("master", "")),
            on_hang=str(told.get("on_hang", "")),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"an identity that makes no sense: {error!r}") from error
