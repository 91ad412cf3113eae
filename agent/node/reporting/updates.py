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

PULSE_REFRESH_S = 1.0  # how often a pulse is told that only went on
BLOCKED_AFTER_S = 0.5  # a call unfinished for so long is worth its arguments
MAX_BLOCKED_CALLS = 8  # of them at most a sequence
_STEP_INDEX = 4  # its place in a word
_MAX_CHAIN_HASHES = 256  # running hashes a sequence, until they are acknowledged

FetchCalls = Callable[[int, int, int], "list[Call]"]  # (uid, from_seq, most): calls, oldest first


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessView:
    """All that is known of one process at one moment. Times are ages in seconds."""

    key: str
    identity: ProcessIdentity
    snapshot: RingSnapshot | None = None
    state: str = "?"
    idle_s: float = 0.0
    cpu_s: float = 0.0
    exit: ExitInfo | None = None
    exit_age_s: float = 0.0
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AckedStream:
    entered: int = -1
    completed: int | None = None
    is_pending: bool = False
    last_checked_seq: int = 0  # the last call whose running hash was within a told range
    last_blocked_seq: int = 0  # the last unfinished call that was told
    is_concurrency_reported: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AckedState:
    """What the server has acknowledged of one process."""

    identity: ProcessIdentity | None = None
    status_key: tuple[Any, ...] = ()
    reported_at_ns: int = 0
    last_alive_ns: int = 0  # latest sign of life in it
    streams: Mapping[int, AckedStream] = field(default_factory=dict)
    check_entries: int = 0  # entries of the table of checks

    @property
    def includes_exit(self) -> bool:
        """The end of the process is among it."""
        return bool(self.status_key) and self.status_key[0] is not None


@dataclass(slots=True)
class UnackedHistory:
    """Running hashes that the server has not acknowledged, by sequence: thinned, not cut, when it
    is away for long.
    """

    cursor: int = 0  # records taken in
    chains: dict[int, dict[int, int]] = field(default_factory=dict)
    newest_ops: dict[int, str] = field(default_factory=dict)
    first_concurrent: dict[int, int] = field(
        default_factory=dict
    )  # the first call that two threads made at once
    check_history: CheckHistory = field(default_factory=CheckHistory)

    def add_delta(self, delta: RingDelta) -> None:
        self.cursor = delta.next_index
        self.newest_ops.update(delta.newest_ops)
        self.first_concurrent = delta.first_concurrent | self.first_concurrent
        for uid, fresh in delta.chains.items():
            held = self.chains.setdefault(uid, {})
            held.update(fresh)
            step = 1
            while len(held) > _MAX_CHAIN_HASHES:
                step *= 2
                held = {seq: chain for seq, chain in held.items() if seq % step == 0}
            self.chains[uid] = held

    def mark_acked(self, acked: AckedState) -> None:
        self.check_history.mark_acked(acked.check_entries)
        for uid, sequence in acked.streams.items():
            if held := self.chains.get(uid):
                self.chains[uid] = {
                    seq: chain for seq, chain in held.items() if seq > sequence.last_checked_seq
                }

    def rewind_cursor(self) -> None:
        """Starts anew with what the ring still has."""
        self.cursor = 0
        self.chains.clear()
        self.check_history.rewind_cursor()


def select_checkpoints(
    chains: Mapping[int, int], after: int, upto: int
) -> tuple[tuple[int, int], ...]:
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


def compose_update(
    view: ProcessView,
    acked: AckedState | None,
    history: UnackedHistory,
    now_ns: int,
    fetch_calls: FetchCalls,
    last_calls: Mapping[int, list[Call]],
) -> tuple[ProcessUpdate | None, AckedState]:
    """The update that is due, if any, and what will have been told once it is acknowledged.

    ``tails`` are the last calls of every sequence of a process that has ended.
    """
    before = acked or AckedState()
    sequences: list[StreamUpdate] = []
    after = dict(before.streams)
    for state in view.snapshot.streams if view.snapshot else ():
        ending = last_calls.get(state.uid, []) if view.exit and not before.includes_exit else None
        update, after[state.uid] = _compose_stream_update(
            state, before.streams.get(state.uid), history, fetch_calls, ending
        )
        if update is not None:
            sequences.append(update)
    word = _make_status_key(view, now_ns)
    alive_ns = now_ns - int(
        1e9 * min(view.idle_s, (view.snapshot and view.snapshot.pulse_s) or view.idle_s)
    )
    lived = (
        alive_ns > before.last_alive_ns + 1_000_000
        and now_ns - before.reported_at_ns >= PULSE_REFRESH_S * 1e9
    )
    known = before.identity is not None and is_same_identity(view.identity, before.identity)
    found, checks = history.check_history.build_update_fields(before.check_entries, now_ns)
    if (
        known
        and not found
        and not sequences
        and word == before.status_key
        and not (lived and view.exit is None)
    ):
        return None, before
    return (
        replace(_make_update(view, known, tuple(sequences), now_ns), **found),
        AckedState(
            identity=view.identity,
            status_key=word,
            reported_at_ns=now_ns,
            last_alive_ns=alive_ns,
            streams=after,
            check_entries=checks,
        ),
    )


def _make_status_key(view: ProcessView, now_ns: int) -> tuple[Any, ...]:
    """What of a process is told as soon as it changes. Running and sleeping are one: they alternate
    all the time.
    """
    ring = view.snapshot
    state = "S" if view.state in "RSI" else view.state
    if ring is None:
        return (view.exit, state, view.faults)
    began_ms = round((now_ns / 1e9 - ring.phase_s) * 1e3) if ring.phase else 0
    words = None if ring.exception is None else str(ring.exception)
    return (
        view.exit, state, view.faults, ring.lifecycle, ring.step, ring.phase, began_ms, ring.phase_limit_s,
        ring.dropped, ring.faults, words,
    )  # fmt: skip


def without_step(status_key: tuple[Any, ...]) -> tuple[Any, ...]:
    return status_key[:_STEP_INDEX] + status_key[_STEP_INDEX + 1 :]


def _make_update(
    view: ProcessView, known: bool, sequences: tuple[StreamUpdate, ...], now_ns: int
) -> ProcessUpdate:
    ring = view.snapshot
    update = ProcessUpdate(
        key=view.key,
        identity=None if known else view.identity,
        state=view.state,
        idle_s=round(view.idle_s, 3),
        cpu_s=view.cpu_s,
        ended=view.exit,
        ended_s=view.exit_age_s,
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
        raised=(raised := parse_exception(ring.exception)),
        raised_s=_exception_age_s(ring.exception, now_ns) if raised else 0.0,
        dropped=ring.dropped,
        faults=view.faults + ring.faults,
        sequences=sequences,
    )


def _compose_stream_update(
    state: StreamState,
    acked: AckedStream | None,
    history: UnackedHistory,
    fetch_calls: FetchCalls,
    last_calls: list[Call] | None,
) -> tuple[StreamUpdate | None, AckedStream]:
    before = acked or AckedStream()
    chains = history.chains.get(state.uid, {})
    # A call's record may be seen before its sequence counts it, and the other way round: what is
    # missing comes next time.
    upto = min(state.entered, max(chains, default=0))
    after = max(before.last_checked_seq, min(chains, default=1) - 1)
    standing, stood = (
        (last_calls, state.entered)
        if last_calls is not None
        else _find_blocked_calls(state, before, fetch_calls)
    )
    shared = (
        ()
        if before.is_concurrency_reported
        else _find_concurrent_calls(state, history, fetch_calls)
    )
    compared = state.peer is None  # what one rank sends, another need not
    moved = (state.entered, state.completed, state.pending_s is not None) != (
        before.entered,
        before.completed,
        before.is_pending,
    )
    known = AckedStream(
        entered=state.entered,
        completed=state.completed,
        is_pending=state.pending_s is not None,
        last_checked_seq=max(before.last_checked_seq, upto),
        last_blocked_seq=stood,
        is_concurrency_reported=before.is_concurrency_reported or bool(shared),
    )
    if (
        acked is not None
        and not moved
        and not standing
        and not shared
        and upto <= before.last_checked_seq
    ):
        return None, known
    update = StreamUpdate(
        uid=state.uid,
        identity=None if acked is not None else _make_stream_identity(state),
        entered=state.entered,
        completed=state.completed,
        chain=state.chain if compared else 0,
        op=history.newest_ops.get(state.uid, ""),
        entered_s=round(state.entered_s, 4),
        pending_s=None if state.pending_s is None else round(state.pending_s, 4),
        checkpoints=select_checkpoints(chains, after, upto) if compared else (),
        calls=tuple(standing),
        shared=shared,
    )
    return update, known


def _find_concurrent_calls(
    state: StreamState, history: UnackedHistory, fetch_calls: FetchCalls
) -> tuple[Call, ...]:
    """The first call that two threads made at once, after the other thread's last; empty where
    there is none.
    """
    seq = history.first_concurrent.get(state.uid)
    if seq is None:
        return ()
    calls = [
        call
        for call in fetch_calls(state.uid, max(1, seq - MAX_BLOCKED_CALLS), history.cursor)
        if call.seq <= seq
    ]
    before = [call for call in calls if call.thread != calls[-1].thread]
    return (before[-1], calls[-1]) if before and calls[-1].seq == seq else ()


def _find_blocked_calls(
    state: StreamState, before: AckedStream, fetch_calls: FetchCalls
) -> tuple[list[Call], int]:
    """The oldest unfinished calls, once they stand: those not told yet. Where completion is
    unknown, the newest call.

    Also up to which call they were looked for: those that the ring has lost are not looked for
    again.
    """
    if not is_blocked(state):
        return [], before.last_blocked_seq
    oldest = state.entered if state.completed is None else state.completed + 1
    first, last = (
        max(oldest, before.last_blocked_seq + 1),
        min(state.entered, oldest + MAX_BLOCKED_CALLS - 1),
    )
    if first > last:
        return [], before.last_blocked_seq
    found = fetch_calls(state.uid, first, state.entered - first + 1)
    return [call for call in found if first <= call.seq <= last], last


def is_blocked(state: StreamState) -> bool:
    """A call of it has been unfinished for a while; where completion is unknown, the newest may be."""
    unfinished = state.completed is None or state.completed < state.entered
    return (
        unfinished
        and (state.entered_s if state.pending_s is None else state.pending_s) >= BLOCKED_AFTER_S
    )


def _make_stream_identity(state: StreamState) -> StreamIdentity:
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


def is_same_identity(one: ProcessIdentity, other: ProcessIdentity) -> bool:
    """Equal but for its age, which passes."""
    return one is other or replace(one, started_s=0.0) == replace(other, started_s=0.0)


def parse_exception(data: Mapping[str, Any] | None) -> ExceptionInfo | None:
    """A ring's last words, as far as they make sense."""
    if not data or not data.get("type"):
        return None
    site = None
    if data.get("file"):
        try:
            site = Site(
                file=str(data["file"]),
                line=int(data.get("line", 0)),
                function=str(data.get("function", "?")),
            )
        except (TypeError, ValueError):
            site = None
    return ExceptionInfo(type=str(data["type"]), message=str(data.get("message", "")), site=site)


def _exception_age_s(data: Mapping[str, Any] | None, now_ns: int) -> float:
    at_ns = (data or {}).get("at_ns")
    return max(0, now_ns - at_ns) / 1e9 if isinstance(at_ns, int) else 0.0


def parse_identity(
    data: Mapping[str, Any], *, pid: int, start_ticks: int
) -> ProcessIdentity | None:
    """Who a ring says its process is, but for its age; None while it does not know its rank. Raises
    ValueError for nonsense.
    """
    if data.get("rank") is None:
        return None
    try:
        local = data.get("local_rank")
        return ProcessIdentity(
            job=str(data["job"]),
            restart=int(data.get("restart", 0)),
            rank=int(data["rank"]),
            world_size=int(data.get("world_size", 0)),
            local_rank=None if local is None else int(local),
            pid=pid,
            start_ticks=start_ticks,
            python=str(data.get("python", "")),
            torch=str(data.get("torch", "")),
            program=str(data.get("program", "")),
            master=str(data.get("master", "")),
            on_hang=str(data.get("on_hang", "")),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"an identity that makes no sense: {error!r}") from error
