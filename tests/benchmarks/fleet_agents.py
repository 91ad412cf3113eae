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

from .fleet_job import (
    NEIGHBOURS_WAIT,
    REPLICAS_WAIT,
    SETUP,
    TENSOR,
    Fault,
    Place,
    Run,
    groups_created,
    identities,
    places,
)

STANDS_S, MOVES_S, COMPRESS_FROM, PATIENT_S = (
    0.5,
    3.0,
    4096,
    15.0,
)  # as the real node agent has them
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 10.0  # likewise
SAMPLED_S = 0.3  # that py-spy takes
LOOKS_S = 0.5  # between two looks at its ranks
NOTICED_S, WAIT_NOTICED_S = 0.25, 1.25  # after which a node agent sees news; as it looks so often
JOB = "fleet"


@dataclass(slots=True)
class Counts:
    """What one process of node agents did."""

    beats: int = 0
    bytes: int = 0
    failures: int = 0  # connections that could not be made or were lost while an answer was due
    refused: int = 0  # answers that said no
    resyncs: int = 0
    interval_s: float = 0.0
    late_s: float = 0.0  # of the heartbeat that was sent latest after it was due
    answered_s: float = 0.0  # the longest that an answer took

    def add(self, more: Counts) -> None:
        for name in ("beats", "bytes", "failures", "refused", "resyncs"):
            setattr(self, name, getattr(self, name) + getattr(more, name))
        for name in ("interval_s", "late_s", "answered_s"):
            setattr(self, name, max(getattr(self, name), getattr(more, name)))


@dataclass(slots=True)
class Told:
    """What the server knows of one rank."""

    entered: dict[int, int] = field(default_factory=dict)
    standing: bool = False
    shared: bool = False


class Host(asyncio.Protocol):
    """One node agent."""

    def __init__(self, agents: Agents, number: int) -> None:
        self.agents, self.number = agents, number
        self.full, self.beats = True, 0
        self.untold = False  # a heartbeat was refused or lost
        self.told: dict[int, Told] = {}
        self.parts: dict[tuple[Any, ...], tuple[str, Told]] = {}  # of this heartbeat
        self.extra: dict[str, list[dict[str, Any]]] = {}  # answers to commands, until they are sent
        self.acknowledged: dict[
            int, Told
        ] = {}  # as `told` was before the heartbeat that is under way, and the answers in that
        self.carried: dict[str, list[dict[str, Any]]] = {}
        self.failures = 0  # in a row
        self.due = self.sent = 0.0
        self.news_s: float | None = None  # within which the server wants news
        self.brief_until = 0.0  # where all ranks get on
        self.urgent = self.hurries = False
        self.busy = self.over = False
        self._received = b""
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None

    @property
    def ranks(self) -> range:
        return range(self.number * TENSOR, (self.number + 1) * TENSOR)

    def begin(self) -> None:
        """A new attempt: new processes, and a new node agent."""
        self.full, self.over, self.beats = True, False, 0
        self.told, self.extra = {}, {}

    def after(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.due = self.agents.loop.time() + seconds
        self._timer = self.agents.loop.call_at(self.due, self._post)

    def _post(self) -> None:
        if self.busy or self.over:
            self.hurries = self.urgent  # as soon as that is answered
            return
        now = time.monotonic()
        if self.agents.silent(self.number, now):
            return self.after(1.0)
        if self._transport is None:
            self.busy = True
            self.agents.connect(self)
            return None
        self.agents.counts.late_s = max(
            self.agents.counts.late_s, self.agents.loop.time() - self.due
        )
        urgent, self.urgent = self.urgent or bool(self.extra), False
        body = self._beat(now).encode()
        coding = b"Priority: u=1\r\n" if urgent else b""
        if len(body) > COMPRESS_FROM:
            body, coding = gzip.compress(body, 1), coding + b"Content-Encoding: gzip\r\n"
        self.busy, self.sent = True, self.agents.loop.time()
        self.agents.counts.beats += 1
        self.agents.counts.bytes += len(body)
        head = b"POST /api/v1/heartbeats HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self._transport.write(head + coding + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.agents.loop.call_later(PATIENT_S, self._transport.abort)
        return None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.busy = transport, False
        self._post()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self.busy:
            self._failed()

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
        self.agents.counts.answered_s = max(
            self.agents.counts.answered_s, self.agents.loop.time() - self.sent
        )
        if head[9:12] != b"200":
            self.agents.counts.refused += 1
            return self._again(
                int(head.lower().partition(b"retry-after:")[2].split(b"\r\n")[0] or 0)
            )
        self._answered(json.loads(body))

    def _failed(self) -> None:
        self.busy = False
        self.agents.counts.failures += 1
        self._again()

    def _again(self, wait_s: float = 0.0) -> None:
        """The server does not know what that heartbeat said: it is told again, but not before
        ``wait_s``.
        """
        self.told, self.untold = self.acknowledged, True
        for what, answers in self.carried.items():
            self.extra[what] = answers + self.extra.get(what, [])
        self.failures += 1
        self.after(
            wait_s
            + random.uniform(
                0.0, min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(self.failures, 16))
            )
        )

    def _answered(self, reply: dict[str, Any]) -> None:
        run = self.agents.run
        if reply.get("resync"):
            self.agents.counts.resyncs += 1
            again = not self.full
            self.full, self.told = True, {}
            return self.after(0.0 if again else 0.5)
        self.full = self.untold = False
        self.failures = 0
        if time.monotonic() >= run.ended_at:
            self.over = True
            return None
        interval = self.agents.counts.interval_s = reply.get("interval_s", 0.5)
        self.news_s = reply.get("news_s")
        hurries, self.hurries = self.hurries, False
        self.urgent = hurries or reply.get("urgent", False)
        self.brief_until = time.monotonic() + (reply.get("details_s") or 0.0)
        self.after(0.0 if self.extra or hurries else interval)
        for command in reply.get("commands", ()):
            self.agents.loop.call_later(
                SAMPLED_S if command["ask"] == "stacks" else 0.0, self._obey, command
            )
        return None

    def _obey(self, command: dict[str, Any]) -> None:
        now, rank = time.monotonic(), int(command["key"].partition("-")[0])
        if command["ask"] == "stacks":
            answer = {
                "key": command["key"],
                "request": command["id"],
                "source": "py-spy",
                "threads": [self.agents.stack(rank, now)],
            }
            self.extra.setdefault("samples", []).append(answer)
        else:
            place = next(
                (p for p in places(self.agents.run, rank, now) if p.uid == command["uid"]), None
            )
            calls = (
                [place.call(n, now) for n in range(max(1, command["from_seq"]), place.entered + 1)][
                    -64:
                ]
                if place
                else []
            )
            answer = {
                "key": command["key"],
                "request": command["id"],
                "uid": command["uid"],
                "calls": calls,
            }
            self.extra.setdefault("calls", []).append(answer)
        if not self.busy:
            self._post()

    def end(self) -> None:
        """One of its ranks has ended, which is told at once."""
        self.urgent = True
        self._post()

    def notice(self, fault: Fault) -> None:
        """There will be news of a fault: as the node agent's `news` has it, what makes this host
        another than the others.
        """
        at = None
        if fault.kind is VerdictKind.GROUP_MISMATCH or (
            fault.host == self.number
            and fault.kind in (VerdictKind.FROZEN_RANK, VerdictKind.CONCURRENT_USE)
        ):
            at = fault.at + NOTICED_S
        elif (fault.kind is VerdictKind.NO_PROGRESS and fault.host == self.number) or self._apart(
            fault.at + NEIGHBOURS_WAIT
        ):
            at = fault.at + NEIGHBOURS_WAIT + WAIT_NOTICED_S
        if at is not None:
            seen_at = self.agents.loop.time() + max(0.0, at - time.monotonic())
            self.agents.loop.call_at(
                seen_at, self._tell_news, fault.kind is not VerdictKind.GROUP_MISMATCH, seen_at
            )

    def _apart(self, now: float) -> bool:
        """Some of its ranks wait and others do not, or they wait in different operations."""
        waits = {
            next((p.op for p in places(self.agents.run, rank, now) if p.since), None)
            for rank in self.ranks
        }
        return len(waits) > 1

    def _tell_news(self, urgent: bool, seen_at: float) -> None:
        """Unless a heartbeat that was sent since then tells it anyway."""
        if self.busy:
            self.agents.loop.call_later(LOOKS_S, self._tell_news, urgent, seen_at)
        elif self.news_s is not None and self.sent < seen_at and not self.over:
            within, self.news_s, self.urgent = random.uniform(0.0, self.news_s), None, urgent
            if self.agents.loop.time() + within < self.due:
                self.after(within)

    def _beat(self, now: float) -> str:
        self.beats += 1
        self.parts = {}
        self.acknowledged = {
            rank: replace(told, entered=dict(told.entered)) for rank, told in self.told.items()
        }
        brief = now < self.brief_until and self._get_on(now)
        processes = ",".join(
            [self._process(rank, now) for rank in self.ranks]
            if not brief
            else self._groups_made(now)
        )
        extra, self.extra = self.extra, {}
        self.carried = extra
        beat = {
            "host": f"node{self.number}", "agent": f"{self.agents.run.number}-{self.number}", "number": self.beats, "full": self.full,
            "brief": brief, "sent_s": round(now, 3), **extra,
        }  # fmt: skip
        return f'{_json(beat)[:-1]},"processes":[{processes}]}}'

    def _get_on(self, now: float) -> bool:
        """All its ranks do, and there is nothing else to tell: as the node agent's `brevity` has
        it.
        """
        run = self.agents.run
        if (
            self.full
            or self.untold
            or now >= run.ended_at
            or any(told.standing for told in self.told.values())
        ):
            return False
        if any(
            run.suffers(VerdictKind.CONCURRENT_USE, rank, now) and not told.shared
            for rank, told in self.told.items()
        ):
            return False
        fault = run.fault(now)
        if fault is None or now - fault.at < STANDS_S:
            return True
        if (
            fault.kind is VerdictKind.STARTUP_STALL
            or fault.host == self.number
            or now - fault.at > MOVES_S
        ):
            return False
        return not any(
            place.since and now - place.since >= STANDS_S
            for rank in self.ranks
            for place in places(run, rank, now)
        )

    def _groups_made(self, now: float) -> list[str]:
        """All that is told of ranks that get on."""
        run, found = self.agents.run, []
        created = groups_created(run, now)
        for rank, told in self.told.items():
            if told.entered.get(SETUP) != created:
                place = next(p for p in places(run, rank, now) if p.uid == SETUP)
                found.append(
                    _json(
                        {
                            "key": f"{rank}-{run.number}",
                            "sequences": [place.told(told.entered.get(SETUP, 0), now, False)],
                        }
                    )
                )
                told.entered[SETUP] = created
        return found

    def _process(self, rank: int, now: float) -> str:
        run, fault = self.agents.run, self.agents.run.fault(now)
        culprit = fault.kind if fault is not None and fault.rank == rank else None
        told = self.told.setdefault(rank, Told())
        since = fault.at if fault is not None else now
        starting = fault is not None and fault.kind is VerdictKind.STARTUP_STALL
        busy = culprit is VerdictKind.SLOW_RANK or now < since + REPLICAS_WAIT
        made: dict[str, Any] = {
            "key": f"{rank}-{run.number}", "lifecycle": 3 if not starting else 1 if culprit else 2, "step": int(run.steps(now)),
            "pulse_s": now - since if culprit is VerdictKind.FROZEN_RANK else 0.05, "state": "T" if culprit is VerdictKind.FROZEN_RANK else "S",
            "idle_s": 0.01 if busy else round(now - since, 3), "cpu_s": round(now - run.began, 2),
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
                "job": JOB, "restart": run.number, "rank": rank, "world_size": run.shape.ranks, "local_rank": rank % TENSOR,
                "pid": 1000 + rank, "start_ticks": run.number, "started_s": round(now - run.began, 2), "program": "train.py",
                "python": "3.11.9", "torch": "2.13.0", "master": "node0:29500",
            }  # fmt: skip
        sequences = self._sequences(rank, told, now)
        return f'{_json(made)[:-1]},"sequences":[{sequences}]}}' if sequences else _json(made)

    def _sequences(self, rank: int, told: Told, now: float) -> str:
        """Nearly always what another rank of the host tells, word for word: that is put together
        once.
        """
        alike = None
        if not self.full and not self.agents.run.singled_out(rank, now):
            alike = (told.standing, *told.entered.items())
            if (made := self.parts.get(alike)) is not None:
                text, first = made
                told.entered, told.standing = dict(first.entered), first.standing
                return text
        text = ",".join([_json(part) for part in self._parts_told(rank, told, now)])
        if alike is not None:
            self.parts[alike] = (text, told)
        return text

    def _parts_told(self, rank: int, told: Told, now: float) -> list[dict[str, Any]]:
        run = self.agents.run
        known = dict(identities(run.shape, rank)) if self.full else {}
        found: list[dict[str, Any]] = []
        stood = told.standing
        told.standing = False
        for place in places(run, rank, now):
            stands = bool(place.since) and now - place.since >= STANDS_S
            moved = told.entered.get(place.uid) != place.entered
            told.standing |= stands
            if moved or (stands and not stood) or place.uid in known:
                part = place.told(told.entered.get(place.uid, 0), now, stands)
                if place.uid in known or place.uid not in told.entered:
                    part["identity"] = (
                        known.get(place.uid) or dict(identities(run.shape, rank))[place.uid]
                    )
                if self._shares(rank, place, told, now):
                    part["shared"] = [
                        {**place.call(n, now), "thread": n}
                        for n in (place.entered - 1, place.entered)
                    ]
                found.append(part)
            told.entered[place.uid] = place.entered
        return found

    def _shares(self, rank: int, place: Place, told: Told, now: float) -> bool:
        if (
            told.shared
            or place.uid != 3
            or not self.agents.run.suffers(VerdictKind.CONCURRENT_USE, rank, now)
        ):
            return False
        told.shared = True
        return True


def _json(told: dict[str, Any]) -> str:
    return msgspec.json.encode(told).decode()


class Agents:
    """All hosts of one process."""

    def __init__(self, port: int, hosts: range, run: Run) -> None:
        self.loop = asyncio.get_running_loop()
        self.port, self.run, self.counts = port, run, Counts()
        self.hosts = [Host(self, n) for n in hosts]
        self._connecting: set[asyncio.Task[None]] = set()

    def connect(self, host: Host) -> None:
        async def connecting() -> None:
            try:
                await self.loop.create_connection(lambda: host, "127.0.0.1", self.port)
            except OSError:
                host._failed()

        task = self.loop.create_task(connecting())
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def start(self, run: Run, ramp_s: float) -> None:
        self.run = run
        for host in self.hosts:
            host.begin()
            host.after(random.uniform(0.0, ramp_s))

    def tell(self, run: Run) -> None:
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
                    max(0.0, run.faults[-1].at - time.monotonic()) + 0.01, host.end
                )
            elif run.ended_at < float("inf"):
                host.after(
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
                    host.notice(fault)

    def silent(self, host: int, now: float) -> bool:
        fault = self.run.fault(now)
        return fault is not None and fault.kind is VerdictKind.LOST_NODE and fault.host == host

    def stack(self, rank: int, now: float) -> dict[str, Any]:
        fault = self.run.fault(now)
        waits = any(place.since for place in places(self.run, rank, now))
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


async def _play(port: int, hosts: range, run: Run, ramp_s: float, orders: Connection) -> None:
    agents = Agents(port, hosts, run)
    agents.start(run, ramp_s)
    over = asyncio.Event()

    def obey() -> None:
        try:
            what, value = orders.recv()
        except EOFError:
            what, value = "stop", None
        if what == "stop":
            over.set()
        elif what == "start":
            agents.start(*value)
        elif what == "tell":
            agents.tell(value)
        elif what == "counts":
            orders.send(
                (agents.counts, time.process_time(), sum(host.over for host in agents.hosts))
            )
            agents.counts = Counts()

    agents.loop.add_reader(orders.fileno(), obey)
    await over.wait()


def play(port: int, hosts: range, run: Run, ramp_s: float, orders: Connection) -> None:
    """The body of the process. ``orders`` are ("start", (run, ramp)), ("tell", run), ("counts",
    None) and ("stop", None).
    """
    asyncio.run(_play(port, hosts, run, ramp_s, orders))
