"""Composes the update of one process: what the server does not know yet. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from hangwatch.model.calls import Call
from hangwatch.model.flight_dumps import FlightFile
from hangwatch.model.ranks import ExitInfo
from hangwatch.protocol.heartbeat import ProcessIdentity, ProcessUpdate, StreamUpdate
from hangwatch.ring.snapshot import RingSnapshot, StreamState

from .acked import AckedState, AckedStream, UnackedHistory
from .device_updates import compose_device_statuses, find_missing_setting
from .ring_metadata import exception_age_s, parse_exception
from .stream_updates import FetchCalls, compose_stream_update

PULSE_REFRESH_S = 1.0  # how often a process is reported whose pulse is its only change

MAX_CLOSED_REPORTED = 4096  # streams in one heartbeat

_STEP_INDEX = 4  # of the step in a status key


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessView:
    """The state of one process at one moment. Times are ages in seconds."""

    key: str
    identity: ProcessIdentity
    snapshot: RingSnapshot | None = None
    state: str = "?"
    idle_s: float = 0.0
    cpu_s: float = 0.0
    exit: ExitInfo | None = None
    exit_age_s: float = 0.0
    faults: tuple[str, ...] = ()
    flight_file: FlightFile | None = None


def compose_update(
    view: ProcessView,
    acked: AckedState | None,
    history: UnackedHistory,
    now_ns: int,
    fetch_calls: FetchCalls,
    last_calls: Mapping[int, list[Call]],
) -> tuple[ProcessUpdate | None, AckedState]:
    """The update that is due, if any, and what the server will know once it has acknowledged it.

    ``last_calls`` are the last calls of every stream of a process that has exited.
    """
    before = acked or AckedState()
    sequences: list[StreamUpdate] = []
    losses: list[tuple[int, int, int]] = []
    after = dict(before.streams)
    is_ending = view.exit is not None and not before.includes_exit
    for state in _list_unreported_streams(view.snapshot, before, now_ns, is_ending=is_ending):
        ending = last_calls.get(state.uid, []) if view.exit and not before.includes_exit else None
        stream_update, after[state.uid] = compose_stream_update(
            state, before.streams.get(state.uid), history, fetch_calls, ending
        )
        if stream_update is not None:
            sequences.append(stream_update)
        loss, acked_stream = state.loss, before.streams.get(state.uid)
        known_from_seq = acked_stream.lost_from_seq if acked_stream is not None else 0
        if loss is not None and loss.from_seq != known_from_seq:
            losses.append((state.uid, loss.from_seq, int(loss.reason)))
    closed = _find_closed_streams(view.snapshot, after)
    for uid in closed:
        del after[uid]
    device, device_entries = (
        compose_device_statuses(view.snapshot, before.device_entries, now_ns)
        if view.snapshot
        else ((), before.device_entries)
    )
    status_key = _make_status_key(view, now_ns)
    silent_s = view.idle_s
    if view.snapshot is not None and view.snapshot.pulse_s:
        silent_s = min(silent_s, view.snapshot.pulse_s)
    alive_ns = now_ns - int(1e9 * silent_s)
    is_pulse_due = (
        alive_ns > before.last_alive_ns + 1_000_000
        and now_ns - before.reported_at_ns >= PULSE_REFRESH_S * 1e9
    )
    is_known = before.identity is not None and is_same_identity(view.identity, before.identity)
    check_fields, check_entries = history.check_history.build_update_fields(
        before.check_entries, now_ns
    )
    if (
        is_known
        and not check_fields
        and not sequences
        and not losses
        and not closed
        and not device
        and status_key == before.status_key
        and not (is_pulse_due and view.exit is None)
    ):
        return None, before
    after_ack = AckedState(
        identity=view.identity,
        status_key=status_key,
        reported_at_ns=now_ns,
        last_alive_ns=alive_ns,
        streams=after,
        dormant_chunks=view.snapshot.dormant_chunks if view.snapshot else (),
        check_entries=check_entries,
        device_entries=device_entries,
    )
    update = _make_update(view, is_known, tuple(sequences), now_ns)
    update = replace(update, device=device, losses=tuple(losses), closed=closed, **check_fields)
    return update, after_ack


def _list_unreported_streams(
    snapshot: RingSnapshot | None, before: AckedState, now_ns: int, *, is_ending: bool
) -> Iterable[StreamState]:
    """The streams of which there may be something to report. Dormant ones are reported once, and again
    when the process ends.
    """
    if snapshot is None:
        return ()
    reported = () if is_ending else before.dormant_chunks
    dormant: list[StreamState] = []
    for chunk, reported_chunk in zip_longest(snapshot.dormant_chunks, reported):
        if chunk is not reported_chunk and chunk is not None:
            dormant += [state.update_ages(now_ns) for state in chunk]
    return (*snapshot.active_streams, *dormant)


def _find_closed_streams(
    snapshot: RingSnapshot | None, known: Mapping[int, AckedStream]
) -> tuple[int, ...]:
    """The known streams that the ring has no more."""
    if snapshot is None or snapshot.torn_parts or len(known) == len(snapshot.streams):
        return ()
    uids = {state.uid for state in snapshot.streams}
    return tuple([uid for uid in known if uid not in uids][:MAX_CLOSED_REPORTED])


def _make_status_key(view: ProcessView, now_ns: int) -> tuple[Any, ...]:
    """What is reported as soon as it changes. Running and sleeping count as the same state, since
    they alternate all the time.
    """
    ring = view.snapshot
    state = "S" if view.state in "RSI" else view.state
    if ring is None:
        return (view.exit, state, view.faults, view.flight_file)
    began_ms = round((now_ns / 1e9 - ring.phase_s) * 1e3) if ring.phase else 0
    exception = None if ring.exception is None else str(ring.exception)
    return (
        view.exit, state, view.faults, ring.lifecycle, ring.step, ring.phase, began_ms, ring.phase_limit_s,
        ring.dropped, ring.faults, exception, view.flight_file,
    )  # fmt: skip


def without_step(status_key: tuple[Any, ...]) -> tuple[Any, ...]:
    return status_key[:_STEP_INDEX] + status_key[_STEP_INDEX + 1 :]


def _make_update(
    view: ProcessView, is_known: bool, sequences: tuple[StreamUpdate, ...], now_ns: int
) -> ProcessUpdate:
    ring = view.snapshot
    update = ProcessUpdate(
        key=view.key,
        identity=None if is_known else view.identity,
        state=view.state,
        idle_s=round(view.idle_s, 3),
        cpu_s=view.cpu_s,
        ended=view.exit,
        ended_s=view.exit_age_s,
        faults=view.faults,
        flight_file=view.flight_file,
    )
    if ring is None:
        return update
    raised = parse_exception(ring.exception)
    return replace(
        update,
        lifecycle=ring.lifecycle,
        step=ring.step,
        phase=ring.phase,
        phase_s=ring.phase_s if ring.phase else 0.0,
        phase_limit_s=ring.phase_limit_s,
        pulse_s=round(ring.pulse_s, 4) or None,  # 0: its recorder has not run yet
        raised=raised,
        raised_s=exception_age_s(ring.exception, now_ns) if raised else 0.0,
        dropped=ring.dropped,
        opened=ring.opened,
        faults=view.faults + ring.faults,
        sequences=sequences,
        device_setting=find_missing_setting(ring.device_status, view.identity.torch),
    )


def is_same_identity(one: ProcessIdentity, other: ProcessIdentity) -> bool:
    """Equal except for the age, which always differs."""
    return one is other or replace(one, started_s=0.0) == replace(other, started_s=0.0)
