"""The node agents of a simulated job, as one process plays them: a connection and a heartbeat for
each host, at the server's pace.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import time
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from hangwatch.model.kinds import VerdictKind

from .parallel_job import (
    NEIGHBOURS_WAIT_AFTER_S,
    REPLICAS_WAIT_AFTER_S,
    SETUP,
    TENSOR_PARALLEL_SIZE,
    JobRun,
    SimulatedFault,
    SimulatedStream,
    count_groups_created,
    iter_stream_identities,
    list_streams,
)

BLOCKED_AFTER_S, UNAFFECTED_FOR_S, COMPRESS_FROM_BYTES, REPLY_TIMEOUT_S = (
    0.5,
    3.0,
    4096,
    15.0,
)  # as the real node agent has them
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 10.0  # likewise
PYSPY_DURATION_S = 0.3  # that py-spy takes
SCAN_INTERVAL_S = 0.5  # between two looks at its ranks
CHANGE_DETECTED_S, WAIT_DETECTED_S = (
    0.25,
    1.25,
)  # after which a node agent sees news; as it looks so often
JOB_NAME = "fleet"


@dataclass(slots=True)
class AgentCounts:
    """What one process of node agents did."""

    heartbeats: int = 0
    bytes: int = 0
    failures: int = 0  # connections that could not be made or were lost while an answer was due
    refused: int = 0  # answers that said no
    resyncs: int = 0
    interval_s: float = 0.0
    max_delay_s: float = 0.0  # of the heartbeat that was sent latest after it was due
    max_response_s: float = 0.0  # the longest that an answer took

    def add_counts(self, more: AgentCounts) -> None:
        for name in ("heartbeats", "bytes", "failures", "refused", "resyncs"):
            setattr(self, name, getattr(self, name) + getattr(more, name))
        for name in ("interval_s", "max_delay_s", "max_response_s"):
            setattr(self, name, max(getattr(self, name), getattr(more, name)))


@dataclass(slots=True)
class AckedRank:
    """What the server knows of one rank."""

    entered: dict[int, int] = field(default_factory=dict)
    blocked: bool = False
    shared_call_reported: bool = False


class SimulatedNodeAgent(asyncio.Protocol):
    """One node agent."""

    def __init__(self, agents: NodeAgentPool, number: int) -> None:
        self.agents, self.number = agents, number
        self.full, self.heartbeat_number = True, 0
        self.has_undelivered = False  # a heartbeat was refused or lost
        self.acked: dict[int, AckedRank] = {}
        self.encoded_streams: dict[tuple[Any, ...], tuple[str, AckedRank]] = {}  # of this heartbeat
        self.pending_replies: dict[
            str, list[dict[str, Any]]
        ] = {}  # answers to commands, until they are sent
        self.acked_before: dict[
            int, AckedRank
        ] = {}  # as `told` was before the heartbeat that is under way, and the answers in that
        self.sent_replies: dict[str, list[dict[str, Any]]] = {}
        self.failures = 0  # in a row
        self.due_at = self.sent_at = 0.0
        self.changes_within_s: float | None = None  # within which the server wants news
        self.terse_until = 0.0  # where all ranks get on
        self.urgent = self.urgent_after_reply = False
        self.busy = self.is_finished = False
        self._received = b""
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None

    @property
    def ranks(self) -> range:
        return range(self.number * TENSOR_PARALLEL_SIZE, (self.number + 1) * TENSOR_PARALLEL_SIZE)

    def begin_attempt(self) -> None:
        """A new attempt: new processes, and a new node agent."""
        self.full, self.is_finished, self.heartbeat_number = True, False, 0
        self.acked, self.pending_replies = {}, {}

    def schedule_heartbeat(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.due_at = self.agents.loop.time() + seconds
        self._timer = self.agents.loop.call_at(self.due_at, self._post_heartbeat)

    def _post_heartbeat(self) -> None:
        if self.busy or self.is_finished:
            self.urgent_after_reply = self.urgent  # as soon as that is answered
            return
        now = time.monotonic()
        if self.agents.is_silent(self.number, now):
            return self.schedule_heartbeat(1.0)
        if self._transport is None:
            self.busy = True
            self.agents.connect_host(self)
            return None
        self.agents.counts.max_delay_s = max(
            self.agents.counts.max_delay_s, self.agents.loop.time() - self.due_at
        )
        urgent, self.urgent = self.urgent or bool(self.pending_replies), False
        body = self._encode_heartbeat(now).encode()
        coding = b"Priority: u=1\r\n" if urgent else b""
        if len(body) > COMPRESS_FROM_BYTES:
            body, coding = gzip.compress(body, 1), coding + b"Content-Encoding: gzip\r\n"
        self.busy, self.sent_at = True, self.agents.loop.time()
        self.agents.counts.heartbeats += 1
        self.agents.counts.bytes += len(body)
        head = (
            b"POST /api/v1/heartbeats HTTP/1.1\r\nHost: localhost\r\nContent-Type:"
            b" application/json\r\n"
        )
        self._transport.write(head + coding + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.agents.loop.call_later(REPLY_TIMEOUT_S, self._transport.abort)
        return None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.busy = transport, False
        self._post_heartbeat()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self.busy:
            self._handle_failure()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found or len(body) < int(
            head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
        ):
            return
        self._received, self.busy = b"", False
        if self._timer is not None:
            self._timer.cancel()
        self.agents.counts.max_response_s = max(
            self.agents.counts.max_response_s, self.agents.loop.time() - self.sent_at
        )
        if head[9:12] != b"200":
            self.agents.counts.refused += 1
            return self._schedule_retry(
                int(head.lower().partition(b"retry-after:")[2].split(b"\r\n")[0] or 0)
            )
        self._handle_reply(json.loads(body))

    def _handle_failure(self) -> None:
        self.busy = False
        self.agents.counts.failures += 1
        self._schedule_retry()

    def _schedule_retry(self, wait_s: float = 0.0) -> None:
        """The server does not know what that heartbeat said: it is told again, but not before
        ``wait_s``.
        """
        self.acked, self.has_undelivered = self.acked_before, True
        for what, answers in self.sent_replies.items():
            self.pending_replies[what] = answers + self.pending_replies.get(what, [])
        self.failures += 1
        self.schedule_heartbeat(
            wait_s
            + random.uniform(
                0.0, min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(self.failures, 16))
            )
        )

    def _handle_reply(self, reply: dict[str, Any]) -> None:
        run = self.agents.run
        if reply.get("resync"):
            self.agents.counts.resyncs += 1
            again = not self.full
            self.full, self.acked = True, {}
            return self.schedule_heartbeat(0.0 if again else 0.5)
        self.full = self.has_undelivered = False
        self.failures = 0
        if time.monotonic() >= run.ended_at:
            self.is_finished = True
            return None
        interval = self.agents.counts.interval_s = reply.get("interval_s", 0.5)
        self.changes_within_s = reply.get("news_s")
        hurries, self.urgent_after_reply = self.urgent_after_reply, False
        self.urgent = hurries or reply.get("urgent", False)
        self.terse_until = time.monotonic() + (reply.get("details_s") or 0.0)
        self.schedule_heartbeat(0.0 if self.pending_replies or hurries else interval)
        for command in reply.get("commands", ()):
            self.agents.loop.call_later(
                PYSPY_DURATION_S if command["ask"] == "stacks" else 0.0,
                self._execute_command,
                command,
            )
        return None

    def _execute_command(self, command: dict[str, Any]) -> None:
        now, rank = time.monotonic(), int(command["key"].partition("-")[0])
        if command["ask"] == "stacks":
            answer = {
                "key": command["key"],
                "request": command["id"],
                "source": "py-spy",
                "threads": [self.agents.make_stack(rank, now)],
            }
            self.pending_replies.setdefault("samples", []).append(answer)
        else:
            place = next(
                (p for p in list_streams(self.agents.run, rank, now) if p.uid == command["uid"]),
                None,
            )
            calls = (
                [
                    place.encode_call(n, now)
                    for n in range(max(1, command["from_seq"]), place.entered + 1)
                ][-64:]
                if place
                else []
            )
            answer = {
                "key": command["key"],
                "request": command["id"],
                "uid": command["uid"],
                "calls": calls,
            }
            self.pending_replies.setdefault("calls", []).append(answer)
        if not self.busy:
            self._post_heartbeat()

    def report_exit(self) -> None:
        """One of its ranks has ended, which is told at once."""
        self.urgent = True
        self._post_heartbeat()

    def schedule_fault_changes(self, fault: SimulatedFault) -> None:
        """There will be news of a fault: as the node agent's `news` has it, what makes this host
        another than the others.
        """
        at = None
        if fault.kind is VerdictKind.GROUP_MISMATCH or (
            fault.host == self.number
            and fault.kind in (VerdictKind.FROZEN_RANK, VerdictKind.CONCURRENT_USE)
        ):
            at = fault.starts_at + CHANGE_DETECTED_S
        elif (
            fault.kind is VerdictKind.NO_PROGRESS and fault.host == self.number
        ) or self._has_mixed_waits(fault.starts_at + NEIGHBOURS_WAIT_AFTER_S):
            at = fault.starts_at + NEIGHBOURS_WAIT_AFTER_S + WAIT_DETECTED_S
        if at is not None:
            seen_at = self.agents.loop.time() + max(0.0, at - time.monotonic())
            self.agents.loop.call_at(
                seen_at, self._report_changes, fault.kind is not VerdictKind.GROUP_MISMATCH, seen_at
            )

    def _has_mixed_waits(self, now: float) -> bool:
        """Some of its ranks wait and others do not, or they wait in different operations."""
        waits = {
            next((p.op for p in list_streams(self.agents.run, rank, now) if p.pending_since), None)
            for rank in self.ranks
        }
        return len(waits) > 1

    def _report_changes(self, urgent: bool, seen_at: float) -> None:
        """Unless a heartbeat that was sent since then tells it anyway."""
        if self.busy:
            self.agents.loop.call_later(SCAN_INTERVAL_S, self._report_changes, urgent, seen_at)
        elif self.changes_within_s is not None and self.sent_at < seen_at and not self.is_finished:
            within, self.changes_within_s, self.urgent = (
                random.uniform(0.0, self.changes_within_s),
                None,
                urgent,
            )
            if self.agents.loop.time() + within < self.due_at:
                self.schedule_heartbeat(within)

    def _encode_heartbeat(self, now: float) -> str:
        self.heartbeat_number += 1
        self.encoded_streams = {}
        self.acked_before = {
            rank: replace(told, entered=dict(told.entered)) for rank, told in self.acked.items()
        }
        brief = now < self.terse_until and self._is_progressing(now)
        processes = ",".join(
            [self._encode_process(rank, now) for rank in self.ranks]
            if not brief
            else self._encode_new_groups(now)
        )
        extra, self.pending_replies = self.pending_replies, {}
        self.sent_replies = extra
        beat = {
            "host": f"node{self.number}", "agent": f"{self.agents.run.number}-{self.number}", "number": self.heartbeat_number, "full": self.full,
            "brief": brief, "sent_s": round(now, 3), **extra,
        }  # fmt: skip
        return f'{_encode_json(beat)[:-1]},"processes":[{processes}]}}'

    def _is_progressing(self, now: float) -> bool:
        """All its ranks do, and there is nothing else to tell: as the node agent's `brevity` has
        it.
        """
        run = self.agents.run
        if (
            self.full
            or self.has_undelivered
            or now >= run.ended_at
            or any(told.blocked for told in self.acked.values())
        ):
            return False
        if any(
            run.suffers_fault(VerdictKind.CONCURRENT_USE, rank, now)
            and not told.shared_call_reported
            for rank, told in self.acked.items()
        ):
            return False
        fault = run.active_fault(now)
        if fault is None or now - fault.starts_at < BLOCKED_AFTER_S:
            return True
        if (
            fault.kind is VerdictKind.STARTUP_STALL
            or fault.host == self.number
            or now - fault.starts_at > UNAFFECTED_FOR_S
        ):
            return False
        return not any(
            place.pending_since and now - place.pending_since >= BLOCKED_AFTER_S
            for rank in self.ranks
            for place in list_streams(run, rank, now)
        )

    def _encode_new_groups(self, now: float) -> list[str]:
        """All that is told of ranks that get on."""
        run, found = self.agents.run, []
        created = count_groups_created(run, now)
        for rank, told in self.acked.items():
            if told.entered.get(SETUP) != created:
                place = next(p for p in list_streams(run, rank, now) if p.uid == SETUP)
                found.append(
                    _encode_json(
                        {
                            "key": f"{rank}-{run.number}",
                            "sequences": [
                                place.encode_update(told.entered.get(SETUP, 0), now, False)
                            ],
                        }
                    )
                )
                told.entered[SETUP] = created
        return found

    def _encode_process(self, rank: int, now: float) -> str:
        run, fault = self.agents.run, self.agents.run.active_fault(now)
        culprit = fault.kind if fault is not None and fault.rank == rank else None
        told = self.acked.setdefault(rank, AckedRank())
        since = fault.starts_at if fault is not None else now
        starting = fault is not None and fault.kind is VerdictKind.STARTUP_STALL
        busy = culprit is VerdictKind.SLOW_RANK or now < since + REPLICAS_WAIT_AFTER_S
        made: dict[str, Any] = {
            "key": f"{rank}-{run.number}", "lifecycle": 3 if not starting else 1 if culprit else 2, "step": int(run.count_steps(now)),
            "pulse_s": now - since if culprit is VerdictKind.FROZEN_RANK else 0.05, "state": "T" if culprit is VerdictKind.FROZEN_RANK else "S",
            "idle_s": 0.01 if busy else round(now - since, 3), "cpu_s": round(now - run.started_at, 2),
        }  # fmt: skip
        if culprit in (VerdictKind.DEAD_RANK, VerdictKind.EXITED_RANK):
            made["ended"] = (
                {"signal": 9} if culprit is VerdictKind.DEAD_RANK else {"exit_status": 0}
            )
            made["ended_s"] = now - since
        elif now >= run.ended_at:
            made["ended"] = {"signal": 15}
        if self.full:
            made["identity"] = {
                "job": JOB_NAME, "restart": run.number, "rank": rank, "world_size": run.shape.ranks, "local_rank": rank % TENSOR_PARALLEL_SIZE,
                "pid": 1000 + rank, "start_ticks": run.number, "started_s": round(now - run.started_at, 2), "program": "train.py",
                "python": "3.11.9", "torch": "2.13.0", "master": "node0:29500",
            }  # fmt: skip
        sequences = self._encode_streams(rank, told, now)
        return (
            f'{_encode_json(made)[:-1]},"sequences":[{sequences}]}}'
            if sequences
            else _encode_json(made)
        )

    def _encode_streams(self, rank: int, acked: AckedRank, now: float) -> str:
        """Nearly always what another rank of the host tells, word for word: that is put together
        once.
        """
        alike = None
        if not self.full and not self.agents.run.is_singled_out(rank, now):
            alike = (acked.blocked, *acked.entered.items())
            if (made := self.encoded_streams.get(alike)) is not None:
                text, first = made
                acked.entered, acked.blocked = dict(first.entered), first.blocked
                return text
        text = ",".join(
            [_encode_json(part) for part in self._list_stream_updates(rank, acked, now)]
        )
        if alike is not None:
            self.encoded_streams[alike] = (text, acked)
        return text

    def _list_stream_updates(self, rank: int, acked: AckedRank, now: float) -> list[dict[str, Any]]:
        run = self.agents.run
        known = dict(iter_stream_identities(run.shape, rank)) if self.full else {}
        found: list[dict[str, Any]] = []
        stood = acked.blocked
        acked.blocked = False
        for place in list_streams(run, rank, now):
            stands = bool(place.pending_since) and now - place.pending_since >= BLOCKED_AFTER_S
            moved = acked.entered.get(place.uid) != place.entered
            acked.blocked |= stands
            if moved or (stands and not stood) or place.uid in known:
                part = place.encode_update(acked.entered.get(place.uid, 0), now, stands)
                if place.uid in known or place.uid not in acked.entered:
                    part["identity"] = (
                        known.get(place.uid)
                        or dict(iter_stream_identities(run.shape, rank))[place.uid]
                    )
                if self._reports_shared_call(rank, place, acked, now):
                    part["shared"] = [
                        {**place.encode_call(n, now), "thread": n}
                        for n in (place.entered - 1, place.entered)
                    ]
                found.append(part)
            acked.entered[place.uid] = place.entered
        return found

    def _reports_shared_call(
        self, rank: int, stream: SimulatedStream, acked: AckedRank, now: float
    ) -> bool:
        if (
            acked.shared_call_reported
            or stream.uid != 3
            or not self.agents.run.suffers_fault(VerdictKind.CONCURRENT_USE, rank, now)
        ):
            return False
        acked.shared_call_reported = True
        return True


def _encode_json(document: dict[str, Any]) -> str:
    return msgspec.json.encode(document).decode()


class NodeAgentPool:
    """All hosts of one process."""

    def __init__(self, port: int, hosts: range, run: JobRun) -> None:
        self.loop = asyncio.get_running_loop()
        self.port, self.run, self.counts = port, run, AgentCounts()
        self.hosts = [SimulatedNodeAgent(self, n) for n in hosts]
        self._connecting: set[asyncio.Task[None]] = set()

    def connect_host(self, host: SimulatedNodeAgent) -> None:
        async def open_connection() -> None:
            try:
                await self.loop.create_connection(lambda: host, "127.0.0.1", self.port)
            except OSError:
                host._handle_failure()

        task = self.loop.create_task(open_connection())
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def start_run(self, run: JobRun, ramp_s: float) -> None:
        self.run = run
        for host in self.hosts:
            host.begin_attempt()
            host.schedule_heartbeat(random.uniform(0.0, ramp_s))

    def change_run(self, run: JobRun) -> None:
        """The run has changed: ends are reported at once, as a node agent does; when all end,
        within the seconds that launchers take.
        """
        before, self.run = self.run, run
        ended = {
            f.host
            for f in run.faults
            if f.kind in (VerdictKind.DEAD_RANK, VerdictKind.EXITED_RANK) and f not in before.faults
        }
        for host in self.hosts:
            if host.number in ended:
                self.loop.call_later(
                    max(0.0, run.faults[-1].starts_at - time.monotonic()) + 0.01, host.report_exit
                )
            elif run.ended_at < float("inf"):
                host.schedule_heartbeat(
                    max(0.0, run.ended_at - time.monotonic())
                    + random.uniform(0.0, len(self.hosts) / 300)
                )
        if len(run.faults) > len(before.faults):
            fault = run.faults[-1]
            line = (
                fault.host // run.shape.pipeline * run.shape.pipeline
            )  # all others wait alike: no news of theirs
            for host in self.hosts:
                if (
                    fault.kind is VerdictKind.GROUP_MISMATCH
                    or line <= host.number < line + run.shape.pipeline
                ):
                    host.schedule_fault_changes(fault)

    def is_silent(self, host: int, now: float) -> bool:
        fault = self.run.active_fault(now)
        return fault is not None and fault.kind is VerdictKind.LOST_NODE and fault.host == host

    def make_stack(self, rank: int, now: float) -> dict[str, Any]:
        fault = self.run.active_fault(now)
        waits = any(place.pending_since for place in list_streams(self.run, rank, now))
        torch = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
        inner = (
            {"function": "all_reduce", "file": torch, "line": 2810}
            if waits
            else {
                "function": "load_batch",
                "file": "/u/data.py",
                "line": 44 if fault else 40,
                "text": "return self._ready.get()",
            }
        )
        frames = [
            inner,
            {"function": "step", "file": "/u/train.py", "line": 53},
            {"function": "main", "file": "/u/train.py", "line": 9},
        ]
        return {"thread": "MainThread", "main": True, "frames": frames}


async def _play_agents(
    port: int, hosts: range, run: JobRun, ramp_s: float, orders: Connection
) -> None:
    agents = NodeAgentPool(port, hosts, run)
    agents.start_run(run, ramp_s)
    over = asyncio.Event()

    def handle_order() -> None:
        try:
            what, value = orders.recv()
        except EOFError:
            what, value = "stop", None
        if what == "stop":
            over.set()
        elif what == "start":
            agents.start_run(*value)
        elif what == "tell":
            agents.change_run(value)
        elif what == "counts":
            orders.send(
                (agents.counts, time.process_time(), sum(host.is_finished for host in agents.hosts))
            )
            agents.counts = AgentCounts()

    agents.loop.add_reader(orders.fileno(), handle_order)
    await over.wait()


def play_agents(port: int, hosts: range, run: JobRun, ramp_s: float, orders: Connection) -> None:
    """The body of the process. ``orders`` are ("start", (run, ramp)), ("tell", run), ("counts",
    None) and ("stop", None).
    """
    asyncio.run(_play_agents(port, hosts, run, ramp_s, orders))
