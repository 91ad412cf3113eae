"""Encodes the heartbeats of one simulated host: what has changed since the server acknowledged it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from hangwatch.model.kinds import VerdictKind
from hangwatch.model.ranks import Lifecycle
from hangwatch.protocol.codec import encode_message
from hangwatch.protocol.heartbeat import StreamUpdate

from .parallel_job import REPLICAS_WAIT_AFTER_S, TENSOR_PARALLEL_SIZE, JobRun
from .parallel_streams import (
    SETUP,
    TP,
    SimulatedStream,
    count_groups_created,
    iter_stream_identities,
)
from .queued_streams import iter_device_counters
from .rank_streams import BLOCKED_AFTER_S, is_blocked, is_reported_as_blocked, list_streams

UNAFFECTED_FOR_S, PROGRESS_WINDOW_S = 3.0, 3.0  # as in the node agent
JOB_NAME = "fleet"

Document = dict[str, Any]


@dataclass(slots=True)
class AckedRank:
    """What the server has acknowledged of one rank."""

    entered: dict[int, int] = field(default_factory=dict)  # by stream
    blocked_uids: frozenset[int] = frozenset()  # of the streams whose newest call blocks it
    shared_call_reported: bool = False


class HeartbeatEncoder:
    """Keeps what was sent, so that the next heartbeat has only changes."""

    def __init__(self, host: int, get_run: Callable[[], JobRun]) -> None:
        self.host = host
        self.is_full = True  # the next heartbeat has everything
        self.has_undelivered = False  # a heartbeat was refused or lost
        self.terse_until = 0.0  # until then, ranks that make progress may be omitted
        self._get_run = get_run
        self._number = 0
        self._acked: dict[int, AckedRank] = {}
        self._acked_before: dict[int, AckedRank] = {}  # before the heartbeat in flight
        self._encoded_streams: dict[tuple[Any, ...], tuple[str, AckedRank]] = {}  # of a heartbeat

    @property
    def ranks(self) -> range:
        return range(self.host * TENSOR_PARALLEL_SIZE, (self.host + 1) * TENSOR_PARALLEL_SIZE)

    def begin_attempt(self) -> None:
        """A new node agent and new processes."""
        self.is_full, self._number, self._acked = True, 0, {}

    def mark_delivered(self) -> None:
        self.is_full = self.has_undelivered = False

    def mark_undelivered(self) -> None:
        """The next heartbeat repeats what the last one had."""
        self._acked, self.has_undelivered = self._acked_before, True

    def forget_acked(self) -> None:
        """The server has requested everything."""
        self.is_full, self._acked = True, {}

    def encode_heartbeat(self, now: float, replies: Document) -> str:
        """Encodes the next heartbeat as JSON. ``replies`` are those to the server's commands."""
        self._number += 1
        self._encoded_streams = {}
        self._acked_before = {
            rank: replace(acked, entered=dict(acked.entered)) for rank, acked in self._acked.items()
        }
        is_brief = now < self.terse_until and self._is_progressing(now)
        if is_brief:
            processes = list(self._iter_terse_updates(now))
        else:
            processes = [self._encode_process(rank, now) for rank in self.ranks]
        beat = {
            "host": f"node{self.host}",
            "agent": f"{self._get_run().number}-{self.host}",
            "number": self._number,
            "full": self.is_full,
            "brief": is_brief,
            "sent_s": round(now, 3),
            **replies,
        }
        return f'{_encode_json(beat)[:-1]},"processes":[{",".join(processes)}]}}'

    def _is_progressing(self, now: float) -> bool:
        """All ranks make progress and there is nothing else to report, as in the node agent's
        `terse`.
        """
        run = self._get_run()
        if self.is_full or self.has_undelivered or now >= run.ended_at:
            return False
        for rank, acked in self._acked.items():
            has_shared_call = run.suffers_fault(VerdictKind.CONCURRENT_USE, rank, now)
            if has_shared_call and not acked.shared_call_reported:
                return False
        if run.shape.queues_calls:
            return self._makes_calls(now)
        fault = run.active_fault(now)
        if fault is None or now - fault.starts_at < BLOCKED_AFTER_S:
            return True
        if fault.kind is VerdictKind.STARTUP_STALL or fault.host == self.host:
            return False
        if now - fault.starts_at > UNAFFECTED_FOR_S:
            return False
        return not any(
            is_blocked(stream, now)
            for rank in self.ranks
            for stream in list_streams(run, rank, now)
        )

    def _makes_calls(self, now: float) -> bool:
        run = self._get_run()
        return all(
            any(now - stream.entered_at <= PROGRESS_WINDOW_S for stream in streams)
            and not any(is_blocked(stream, now) for stream in streams)
            for streams in (list_streams(run, rank, now) for rank in self.ranks)
        )

    def _iter_terse_updates(self, now: float) -> Iterator[str]:
        """All that is reported of ranks that make progress: new groups, and that they are no longer
        blocked.
        """
        run = self._get_run()
        created = count_groups_created(run, now)
        for rank, acked in self._acked.items():
            if acked.entered.get(SETUP, 0) == created and not acked.blocked_uids:
                continue
            streams = []
            for stream in list_streams(run, rank, now):
                if stream.uid != SETUP and stream.uid not in acked.blocked_uids:
                    continue
                update = stream.encode_update(acked.entered.get(stream.uid, 0), now, False)
                acked.entered[stream.uid] = stream.entered
                streams.append(encode_message(StreamUpdate(**update)))
            acked.blocked_uids = frozenset()
            yield _encode_json({"key": f"{rank}-{run.number}", "sequences": streams})

    def _encode_process(self, rank: int, now: float) -> str:
        acked = self._acked.setdefault(rank, AckedRank())
        update = self._make_process_update(rank, now)
        if self.is_full:
            update["identity"] = self._make_identity(rank, now)
        encoded = _encode_json(update)
        streams = self._encode_streams(rank, acked, now)
        return f'{encoded[:-1]},"sequences":[{streams}]}}' if streams else encoded

    def _make_process_update(self, rank: int, now: float) -> Document:
        run = self._get_run()
        fault = run.active_fault(now)
        fault_at = fault.starts_at if fault is not None else now
        culprit_kind = fault.kind if fault is not None and fault.rank == rank else None
        lifecycle = Lifecycle.INITIALISED
        if fault is not None and fault.kind is VerdictKind.STARTUP_STALL:
            lifecycle = Lifecycle.STARTING if culprit_kind else Lifecycle.INITIALISING
        is_frozen = culprit_kind is VerdictKind.FROZEN_RANK
        is_busy = culprit_kind is VerdictKind.SLOW_RANK or now < fault_at + REPLICAS_WAIT_AFTER_S
        if run.shape.queues_calls and culprit_kind is None:
            is_busy = True  # a host polls its device
        update: Document = {
            "key": f"{rank}-{run.number}",
            "lifecycle": int(lifecycle),
            "step": int(run.count_steps(now)),
            "pulse_s": now - fault_at if is_frozen else 0.05,
            "state": "T" if is_frozen else "S",
            "idle_s": 0.01 if is_busy else round(now - fault_at, 3),
            "cpu_s": round(now - run.started_at, 2),
        }
        if run.shape.queues_calls and lifecycle is Lifecycle.INITIALISED:
            update["device"] = [
                encode_message(status) for status in iter_device_counters(run, rank, now)
            ]
        if culprit_kind is VerdictKind.DEAD_RANK:
            update |= {"ended": {"signal": 9}, "ended_s": now - fault_at}
        elif culprit_kind is VerdictKind.EXITED_RANK:
            update |= {"ended": {"exit_status": 0}, "ended_s": now - fault_at}
        elif now >= run.ended_at:
            update["ended"] = {"signal": 15}
        return update

    def _make_identity(self, rank: int, now: float) -> Document:
        run = self._get_run()
        return {
            "job": JOB_NAME,
            "restart": run.number,
            "rank": rank,
            "world_size": run.shape.ranks,
            "local_rank": rank % TENSOR_PARALLEL_SIZE,
            "pid": 1000 + rank,
            "start_ticks": run.number,
            "started_s": round(now - run.started_at, 2),
            "program": "train.py",
            "python": "3.11.9",
            "torch": "2.13.0",
            "master": "node0:29500",
        }

    def _encode_streams(self, rank: int, acked: AckedRank, now: float) -> str:
        """Encodes the changed streams of a rank. Nearly all ranks of a host have the same, which is
        encoded once.
        """
        if self.is_full or self._get_run().is_singled_out(rank, now):
            return self._encode_stream_updates(rank, acked, now)
        cache_key = (acked.blocked_uids, *acked.entered.items())
        cached = self._encoded_streams.get(cache_key)
        if cached is not None:
            text, same = cached
            acked.entered, acked.blocked_uids = dict(same.entered), same.blocked_uids
            return text
        text = self._encode_stream_updates(rank, acked, now)
        self._encoded_streams[cache_key] = (text, acked)
        return text

    def _encode_stream_updates(self, rank: int, acked: AckedRank, now: float) -> str:
        return ",".join(map(_encode_stream, self._iter_stream_updates(rank, acked, now)))

    def _iter_stream_updates(self, rank: int, acked: AckedRank, now: float) -> Iterator[Document]:
        run = self._get_run()
        identities = dict(iter_stream_identities(run.shape, rank)) if self.is_full else {}
        were_blocked, acked.blocked_uids = acked.blocked_uids, frozenset()
        for stream in list_streams(run, rank, now):
            blocked = is_reported_as_blocked(stream, now)
            if blocked:
                acked.blocked_uids |= {stream.uid}
            before = acked.entered.get(stream.uid)
            acked.entered[stream.uid] = stream.entered
            is_changed = before != stream.entered or blocked != (stream.uid in were_blocked)
            if not is_changed and stream.uid not in identities:
                continue
            update = stream.encode_update(before or 0, now, blocked)
            if stream.uid in identities:
                update["identity"] = identities[stream.uid]
            elif before is None:
                update["identity"] = dict(iter_stream_identities(run.shape, rank))[stream.uid]
            if self._reports_shared_call(rank, stream, acked, now):
                update["shared"] = [
                    {**stream.encode_call(seq, now), "thread": seq}
                    for seq in (stream.entered - 1, stream.entered)
                ]
            yield update

    def _reports_shared_call(
        self, rank: int, stream: SimulatedStream, acked: AckedRank, now: float
    ) -> bool:
        """Whether this update is the first to show that two threads call in one group."""
        if acked.shared_call_reported or stream.uid != TP:
            return False
        is_shared = self._get_run().suffers_fault(VerdictKind.CONCURRENT_USE, rank, now)
        acked.shared_call_reported = is_shared
        return is_shared


def _encode_stream(update: Document) -> str:
    return _encode_json(encode_message(StreamUpdate(**update)))


def _encode_json(document: Any) -> str:
    return msgspec.json.encode(document).decode()
