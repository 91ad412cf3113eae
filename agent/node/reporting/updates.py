"""Composes the update of one process: what the server does not know yet of the positions, checkpoints
and blocked calls of all streams, the counters of the device, and what the rank wrote about itself
into its ring (identity and exception). Pure.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hangwatch.model.calls import Call, StreamKind
from hangwatch.model.groups import pack_ranks
from hangwatch.model.limits import BLOCKED_AFTER_S, FROZEN_AFTER_S
from hangwatch.model.ranks import ExceptionInfo
from hangwatch.protocol.heartbeat import (
    MAX_CHECKPOINTS,
    DeviceStatus,
    ProcessUpdate,
    StreamIdentity,
    StreamUpdate,
)
from hangwatch.ring.layout import DeviceStatusState
from hangwatch.ring.parts import DeviceEntry, compute_age_s, parse_site
from hangwatch.ring.reader import RingSnapshot, StreamState

from .acked import AckedState, AckedStream, UnackedHistory

MAX_BLOCKED_CALLS = 8  # reported for each stream
PULSE_REFRESH_S = 1.0  # how often a process is reported whose pulse is its only change
MAX_CLOSED_REPORTED = 4096  # streams in one heartbeat
# Counters that do not change are confirmed this often while the device is behind: then their age
# matters to the diagnosis.
CONFIRM_INTERVAL_S = 2.0
PROGRESS_WINDOW_S = 3.0  # a rank makes progress if its last call is at most this old
_MAX_CHANNEL_CHECKPOINTS = 2  # a channel has two ends, and a rank may have many channels
_BUFFER_ENTRIES = 2000  # the default where torch has it on

# (uid, from_seq, max_calls): calls, oldest first
FetchCalls = Callable[[int, int, int], list[Call]]


# A ring that cannot be read has no streams, which does not mean that they were closed.
_NO_RING = RingSnapshot(torn_parts=1)


def compose_update(
    process: ProcessUpdate,
    snapshot: RingSnapshot | None,
    acked: AckedState | None,
    history: UnackedHistory,
    now_ns: int,
    fetch_calls: FetchCalls,
    last_calls: Mapping[int, list[Call]],
) -> tuple[ProcessUpdate | None, AckedState]:
    """The update that is due, if any, and what the server will know once it has acknowledged it.

    ``process`` has what is known without the ring; ``last_calls`` are the last calls of every stream
    of a process that has exited.
    """
    before = acked or AckedState()
    identity = process.identity
    ring = snapshot or _NO_RING
    is_ending = process.ended is not None and not before.includes_exit
    stream_fields, streams = _compose_stream_fields(
        ring, before, history, now_ns, fetch_calls, last_calls if is_ending else None
    )
    check_fields, check_entries = history.check_history.build_update_fields(now_ns)
    device_statuses, device_entries = _compose_device_statuses(ring, before, now_ns)
    additions = {
        **stream_fields,
        **check_fields,
        "retractions": tuple((uid, call.seq) for uid, call in history.retractions.items()),
        "device": device_statuses,
    }

    is_known = identity is before.identity or identity == before.identity
    # What is reported when it changes, besides the step. R counts as S, since they alternate.
    state = "S" if process.state in "RSI" else process.state
    phase_began_ms = round((now_ns / 1e9 - ring.phase_s) * 1e3) if ring.phase else 0
    exceptions = str((ring.exception, ring.handled_exception))
    status_key = (
        process.ended, state, process.faults, ring is _NO_RING, ring.lifecycle, ring.phase,
        phase_began_ms, ring.phase_limit_s, ring.dropped, ring.faults, exceptions, process.flight_file,
    )  # fmt: skip
    is_changed = not is_known or status_key != before.status_key or ring.step != before.step
    # The recorder has not run yet if its pulse is 0.
    silent_s = min(process.idle_s, ring.pulse_s) if ring.pulse_s else process.idle_s
    alive_ns = now_ns - int(1e9 * silent_s)
    is_pulse_due = (
        process.ended is None
        and alive_ns > before.last_alive_ns + 1_000_000
        and now_ns - before.reported_at_ns >= PULSE_REFRESH_S * 1e9
    )
    if not (is_changed or is_pulse_due or any(additions.values())):
        return None, before

    after = AckedState(
        identity=identity,
        status_key=status_key,
        step=ring.step,
        reported_at_ns=now_ns,
        last_alive_ns=alive_ns,
        streams=streams,
        dormant_chunks=ring.dormant_chunks,
        check_entries=check_entries,
        device_entries=device_entries,
        retractions=dict(history.retractions),
    )
    additions["identity"] = None if is_known else identity
    return _add_ring_state(process, ring, now_ns, **additions), after


def make_terse_update(
    snapshot: RingSnapshot | None,
    before: AckedState | None,
    update: ProcessUpdate | None,
    after: AckedState | None,
) -> tuple[ProcessUpdate | None, AckedState] | None:
    """The terse update of a rank, if it has anything to report, and what the server knows then. None
    unless the rank makes progress: it runs and makes calls, none of them is known to be blocked, and
    only its positions have changed.

    What a host with infrequent heartbeats leaves out while all of its ranks make progress, which it can
    see by itself, are their positions. It always reports what the server must not miss: that a rank is
    no longer blocked in a call, and the creation of groups, since a single host cannot see whether all
    ranks created the same groups.

    ``before`` is what the server knows, ``update`` the complete update, if any, and ``after`` what
    the server would know after it.
    """
    if snapshot is None or before is None or after is None:
        return None
    if after.status_key != before.status_key or snapshot.pulse_s >= FROZEN_AFTER_S:
        return None
    if snapshot.get_newest_call_s() > PROGRESS_WINDOW_S:
        return None
    # Where completion is unknown, as on NCCL, the newest call of an idle group shows nothing.
    for state in snapshot.active_streams:
        if state.completed is not None and is_blocked(state):
            return None
    if update is None:
        return None, before
    is_running = update.ended is None and update.state in "RSI"
    has_findings = update.checksums or update.nonfinite or update.losses or update.retractions
    if update.identity is not None or has_findings or not is_running:
        return None
    for part in update.streams:
        if part.identity is not None or part.shared:
            return None
        if part.calls and part.completed is not None:
            return None

    reported_uids = set()
    for state in snapshot.streams:
        known = before.streams.get(state.uid)
        is_known_as_blocked = (
            known is not None and known.is_pending and known.last_blocked_seq == known.entered
        )
        if state.kind is StreamKind.SETUP or is_known_as_blocked:
            reported_uids.add(state.uid)
    parts = [part for part in update.streams if part.uid in reported_uids]
    if not parts:
        return None, before
    reported = {part.uid: after.streams[part.uid] for part in parts}
    terse_update = ProcessUpdate(key=update.key, streams=tuple(parts))
    return terse_update, replace(before, streams={**before.streams, **reported})


def _add_ring_state(
    process: ProcessUpdate, ring: RingSnapshot, now_ns: int, **additions: Any
) -> ProcessUpdate:
    """The update with the state of its ring, and with what it has to report besides."""
    raised = parse_exception(ring.exception)
    raised_ns = (ring.exception or {}).get("at_ns")
    raised_s = 0.0
    if raised is not None and isinstance(raised_ns, int):
        raised_s = compute_age_s(now_ns, raised_ns)
    torch_version = process.identity.torch if process.identity is not None else ""
    return replace(
        process,
        lifecycle=ring.lifecycle,
        step=ring.step,
        phase=ring.phase,
        phase_s=ring.phase_s if ring.phase else 0.0,
        phase_limit_s=ring.phase_limit_s,
        pulse_s=round(ring.pulse_s, 4) or None,
        idle_s=round(process.idle_s, 3),
        raised=raised,
        raised_s=raised_s,
        handling=parse_exception(ring.handled_exception),
        dropped=ring.dropped,
        faults=process.faults + ring.faults,
        opened=ring.opened,
        device_setting=find_missing_setting(ring.device_status, torch_version),
        **additions,
    )


def _compose_stream_fields(
    ring: RingSnapshot,
    before: AckedState,
    history: UnackedHistory,
    now_ns: int,
    fetch_calls: FetchCalls,
    last_calls: Mapping[int, list[Call]] | None,
) -> tuple[dict[str, Any], dict[int, AckedStream]]:
    """The fields of a `ProcessUpdate` on its streams, and what the server will know of each stream.
    ``last_calls`` are those of a process whose exit is to be reported.
    """
    # A dormant stream is reported once, and when the process exits.
    states = list(ring.active_streams)
    reported_chunks = before.dormant_chunks if last_calls is None else {}
    for number, chunk in ring.dormant_chunks.items():
        if chunk is not reported_chunks.get(number):
            states += [state.update_ages(now_ns) for state in chunk]
    streams = []
    losses = []
    after = dict(before.streams)
    for state in states:
        known = before.streams.get(state.uid)
        ending = last_calls.get(state.uid, []) if last_calls is not None else None
        update, after[state.uid] = _compose_stream_update(
            state, known, history, fetch_calls, ending
        )
        if update is not None:
            streams.append(update)
        known_from_seq = known.lost_from_seq if known is not None else 0
        if state.loss is not None and state.loss.from_seq != known_from_seq:
            losses.append((state.uid, state.loss.from_seq, int(state.loss.reason)))
    closed: list[int] = []
    if not ring.torn_parts and len(after) != len(ring.streams):
        open_uids = {state.uid for state in ring.streams}
        closed = [uid for uid in after if uid not in open_uids][:MAX_CLOSED_REPORTED]
    for uid in closed:
        del after[uid]
    fields = {"streams": tuple(streams), "losses": tuple(losses), "closed": tuple(closed)}
    return fields, after


def select_checkpoints(
    chains: Mapping[int, int], after: int, upto: int, max_count: int = MAX_CHECKPOINTS
) -> tuple[tuple[int, int], ...]:
    """Running hashes at the multiples of the smallest power of two that has at most ``max_count``
    multiples in ``(after, upto]``.

    >>> select_checkpoints({seq: -seq for seq in range(101, 119)}, after=100, upto=118)
    ((104, -104), (108, -108), (112, -112), (116, -116))
    """
    step = 1
    while upto // step - after // step > max_count:
        step *= 2
    first = (after // step + 1) * step
    seqs = range(first, upto + 1, step)
    return tuple((seq, chains[seq]) for seq in seqs if seq in chains)


def _compose_stream_update(
    state: StreamState,
    acked: AckedStream | None,
    history: UnackedHistory,
    fetch_calls: FetchCalls,
    last_calls: list[Call] | None,
) -> tuple[StreamUpdate | None, AckedStream]:
    before = acked or AckedStream()
    if acked is not None and state.uid in history.retractions:
        last_valid_seq = history.retractions[state.uid].seq - 1
        before = acked._replace(
            entered=-1,
            last_checked_seq=min(acked.last_checked_seq, last_valid_seq),
            last_blocked_seq=min(acked.last_blocked_seq, last_valid_seq),
        )
    chains = history.chains.get(state.uid, {})
    # A call's record may be read before its stream counts it, or after it: then the hash follows in
    # the next update.
    upto = min(state.entered, max(chains, default=0))
    after = max(before.last_checked_seq, min(chains, default=1) - 1)
    if last_calls is not None:
        blocked_calls, last_blocked_seq = last_calls, state.entered
    else:
        blocked_calls, last_blocked_seq = _find_blocked_calls(state, before, fetch_calls)
    # The last call of one thread and the first concurrent call of another
    shared: tuple[Call, ...] = ()
    concurrent_seq = history.first_concurrent.get(state.uid)
    if concurrent_seq is not None and not before.is_concurrency_reported:
        first = max(1, concurrent_seq - MAX_BLOCKED_CALLS)
        calls = fetch_calls(state.uid, first, history.cursor)
        concurrent = next((call for call in calls if call.seq == concurrent_seq), None)
        if concurrent is not None:
            earlier = [call for call in calls if call.seq < concurrent_seq]
            others = [call for call in earlier if call.thread != concurrent.thread]
            shared = (others[-1], concurrent) if others else ()
    max_count = MAX_CHECKPOINTS if state.peer is None else _MAX_CHANNEL_CHECKPOINTS
    # The messages that a receive from any source takes are those of several channels.
    is_compared = state.peer is None or state.peer >= 0
    after_ack = AckedStream(
        entered=state.entered,
        completed=state.completed,
        is_pending=state.pending_s is not None,
        last_checked_seq=max(before.last_checked_seq, upto),
        last_blocked_seq=last_blocked_seq,
        is_concurrency_reported=before.is_concurrency_reported or bool(shared),
        lost_from_seq=state.loss.from_seq if state.loss is not None else 0,
    )
    # Only the position and the hashes are compared: calls that the ring has lost do not count.
    if acked is not None and after_ack[:4] == before[:4] and not blocked_calls and not shared:
        return None, after_ack
    update = StreamUpdate(
        uid=state.uid,
        identity=None if acked is not None else _make_stream_identity(state),
        entered=state.entered,
        completed=state.completed,
        chain=state.chain if is_compared else 0,
        op=history.newest_ops.get(state.uid, ""),
        # Microseconds are kept: hosts queue calls of two groups within 100 us, and their order matters.
        entered_s=round(state.entered_s, 6),
        pending_s=None if state.pending_s is None else round(state.pending_s, 4),
        checkpoints=select_checkpoints(chains, after, upto, max_count) if is_compared else (),
        calls=tuple(blocked_calls),
        shared=shared,
    )
    return update, after_ack


def _find_blocked_calls(
    state: StreamState, before: AckedStream, fetch_calls: FetchCalls
) -> tuple[list[Call], int]:
    """The oldest calls of a blocked stream that were not reported yet (the newest one if completion
    is unknown), and the last call that was searched: those that the ring has lost are searched
    once.
    """
    if not is_blocked(state):
        return [], before.last_blocked_seq
    oldest = state.entered if state.completed is None else state.completed + 1
    first = max(oldest, before.last_blocked_seq + 1)
    last = min(state.entered, oldest + MAX_BLOCKED_CALLS - 1)
    if first > last:
        return [], before.last_blocked_seq
    calls = fetch_calls(state.uid, first, state.entered - first + 1)
    return [call for call in calls if first <= call.seq <= last], last


def is_blocked(state: StreamState) -> bool:
    """A call has been unfinished for a while; if completion is unknown, the newest call may be."""
    if state.completed is not None and state.completed >= state.entered:
        return False
    age_s = state.entered_s if state.pending_s is None else state.pending_s
    return age_s >= BLOCKED_AFTER_S


# All ranks of a host, and all their groups, report mostly the same members.
_pack_cached = functools.lru_cache(maxsize=64)(pack_ranks)


def _make_stream_identity(state: StreamState) -> StreamIdentity:
    group = state.group
    return StreamIdentity(
        kind=state.kind,
        name=group.name,
        desc=group.desc,
        ranks=_pack_cached(group.ranks),
        backend=group.backend,
        generation=group.generation,
        world=group.world_size,
        peer=state.peer,
        tag=state.tag,
        foreign=group.foreign,
        number=group.number,
    )


def _compose_device_statuses(
    ring: RingSnapshot, before: AckedState, now_ns: int
) -> tuple[tuple[DeviceStatus, ...], Mapping[int, DeviceEntry]]:
    """The counters to report, and those that the server will know, by stream uid."""
    statuses = []
    after = dict(before.device_entries)
    uids = {state.uid for state in ring.streams} if ring.device_entries else set()
    for entry in ring.device_entries:
        known = after.get(entry.uid)
        is_due = known is None or entry.counters != known.counters
        if known is not None and entry.is_behind_host:
            is_due |= entry.read_ns - known.read_ns >= CONFIRM_INTERVAL_S * 1e9
        if not is_due or entry.uid not in uids:
            continue
        after[entry.uid] = entry
        status = DeviceStatus(
            uid=entry.uid,
            enqueued=entry.enqueued,
            started=entry.started,
            completed=entry.completed,
            read_s=round(compute_age_s(now_ns, entry.read_ns), 3),
        )
        statuses.append(status)
    return tuple(statuses), after


def find_missing_setting(state: DeviceStatusState, torch_version: str) -> str:
    """The environment variable, with its value, that makes torch count the device's progress; empty
    if it does already or no variable is known.

    >>> find_missing_setting(DeviceStatusState.OFF, "2.9.1+cu128")
    'TORCH_FR_BUFFER_SIZE=2000'
    """
    if state in (DeviceStatusState.UNKNOWN, DeviceStatusState.REPORTED):
        return ""
    version = parse_release(torch_version)
    if state is DeviceStatusState.OFF:
        # The older name works in newer versions too, with a warning.
        name = "TORCH_FR_BUFFER_SIZE" if version >= (2, 9) else "TORCH_NCCL_TRACE_BUFFER_SIZE"
        return f"{name}={_BUFFER_ENTRIES}"
    if state is DeviceStatusState.UNSUPPORTED and version >= (2, 15):
        return "TORCH_DIST_USE_NCCL2=0"  # the process group whose counters are in every version
    return ""


def parse_release(version: str) -> tuple[int, int]:
    """The first two numbers of a version of torch; (0, 0) if it does not begin with two."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def parse_exception(data: dict[str, Any] | None) -> ExceptionInfo | None:
    """An exception of a rank; None if there is none, or it is malformed."""
    if not data or not data.get("type"):
        return None
    return ExceptionInfo(
        type=str(data["type"]), message=str(data.get("message", "")), site=parse_site(data)
    )
