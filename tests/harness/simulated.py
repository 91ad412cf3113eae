"""Jobs of any size that only exist in what their node agents tell the server."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from hangwatch.model.calls import Call, Signature, Site, StreamKind
from hangwatch.model.ranks import ExceptionInfo, ExitInfo
from hangwatch.model.threads import Frame, ThreadStack
from hangwatch.protocol import heartbeat

PLACE = Frame(function="load_batch", file="/u/train.py", line=44, text="return self._ready.get()")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    name: str
    desc: str
    ranks: str  # see `hangwatch.model.groups.pack_ranks`


def whole(ranks: int) -> Callable[[int], list[Group]]:
    """One group of all ranks, as init_process_group makes it."""
    return lambda _: [Group(name="0", desc="default_pg", ranks=f"0-{ranks - 1}")]


@dataclass(slots=True, kw_only=True)
class Job:
    """Trains, one step a second. ``late`` ranks do not come to the call that the others have
    entered. Every text may be set.
    """

    url: str
    ranks: int
    groups: Callable[[int], list[Group]]
    per_host: int = 8
    name: str = "run7"
    host: str = "node{}"
    op: str = "all_reduce"
    phase: str | None = None
    place: Frame = PLACE  # where the late ranks are
    raised: ExceptionInfo | None = None  # how the late ranks end, if they do
    late: set[int] = field(default_factory=set)
    since: float = field(default_factory=time.monotonic)
    began: float = field(default_factory=time.monotonic)
    _numbers: dict[int, int] = field(default_factory=dict)
    _client: httpx.Client = field(
        default_factory=lambda: httpx.Client(trust_env=False, timeout=120)
    )

    @property
    def hosts(self) -> range:
        return range(-(-self.ranks // self.per_host))

    def hang(self, *ranks: int) -> None:
        self.late, self.since = set(ranks), time.monotonic()

    def go_on(self) -> None:
        """Nobody is late any more."""
        self.late = set()

    def end(self) -> None:
        """Every process ends with exit status 0, and its node agents leave."""
        for host in self.hosts:
            ended = tuple(
                dataclasses.replace(p, ended=ExitInfo(exit_status=0))
                for p in self._processes(host, full=False)
            )
            self._post(host, processes=ended, gone=tuple(p.key for p in ended))
        self._client.close()

    def beat(self, host: int, *, full: bool = False) -> None:
        """One host's heartbeat; what the server asks for is answered at once."""
        told = self._post(host, full=full, processes=self._processes(host, full))
        if told.get("resync") and not full:
            return self.beat(host, full=True)
        samples = tuple(self._sample(c) for c in told.get("commands", ()) if c["ask"] == "stacks")
        if samples:
            self._post(host, samples=samples)
        return None

    @contextmanager
    def beating(self, every_s: float = 0.5) -> Iterator[None]:
        """Reports in the background for the length of the block."""
        over = threading.Event()

        def report() -> None:
            full = True
            while not over.is_set():
                with contextlib.suppress(
                    httpx.TransportError
                ):  # a server that is gone may come again, and asks for what it missed
                    for host in self.hosts:
                        self.beat(host, full=full)
                    full = False
                over.wait(every_s)

        thread = threading.Thread(target=report, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self._client.close()

    def _post(self, host: int, **what: Any) -> dict[str, Any]:
        number = self._numbers[host] = self._numbers.get(host, 0) + 1
        beat = heartbeat.Heartbeat(
            host=self.host.format(host), agent=f"{self.name}-{host}", number=number, **what
        )
        told: dict[str, Any] = (
            self._client.post(f"{self.url}/api/v1/heartbeats", json=heartbeat.encode_message(beat))
            .raise_for_status()
            .json()
        )
        return told

    def _processes(self, host: int, full: bool) -> tuple[heartbeat.ProcessUpdate, ...]:
        mine = range(host * self.per_host, min(self.ranks, (host + 1) * self.per_host))
        return tuple(self._process(rank, full) for rank in mine)

    def _process(self, rank: int, full: bool) -> heartbeat.ProcessUpdate:
        now = time.monotonic()
        step = int((self.since if self.late else now) - self.began)
        late, waits = rank in self.late, bool(self.late) and rank not in self.late
        ended = ExitInfo(exit_status=1) if late and self.raised else None
        identity = heartbeat.ProcessIdentity(
            job=self.name,
            rank=rank,
            world_size=self.ranks,
            local_rank=rank % self.per_host,
            pid=1000 + rank,
            start_ticks=5,
        )
        return heartbeat.ProcessUpdate(
            key=f"{1000 + rank}-5",
            identity=identity if full else None,
            lifecycle=3,
            step=step,
            phase=self.phase,
            pulse_s=0.1,
            state="S",
            idle_s=now - self.since if self.late else 0.0,
            ended=ended,
            raised=self.raised if ended else None,
            sequences=tuple(
                self._sequence(n, group, step, full, late, waits)
                for n, group in enumerate(self.groups(rank))
            ),
        )

    def _sequence(
        self, uid: int, group: Group, step: int, full: bool, late: bool, waits: bool
    ) -> heartbeat.StreamUpdate:
        waited = time.monotonic() - self.since
        entered = step + 1 if late or not waits else step + 2
        identity = heartbeat.StreamIdentity(
            kind=StreamKind.COLLECTIVE,
            name=group.name,
            desc=group.desc,
            ranks=group.ranks,
            backend="gloo",
        )
        signature = Signature(
            op=self.op, shapes=((64,),), dtype="float32", reduce_op="sum", agree=5
        )
        site = Site(file="/u/train.py", line=52, function="step")
        return heartbeat.StreamUpdate(
            uid=uid,
            identity=identity if full else None,
            entered=entered,
            completed=entered - 1 if waits else entered,
            op=self.op,
            entered_s=waited if self.late else 0.0,
            pending_s=waited if waits else None,
            calls=(
                Call(seq=entered, signature=signature, site=site, entered_s=waited, blocking=True),
            )
            if waits
            else (),
        )

    def _sample(self, command: dict[str, Any]) -> heartbeat.StackReply:
        late = int(command["key"].partition("-")[0]) - 1000 in self.late
        outer = Frame(function="main", file="/u/train.py", line=60)
        inner = (
            self.place
            if late
            else Frame(function="step", file="/u/train.py", line=52, text="dist.all_reduce(grad)")
        )
        thread = ThreadStack(thread="MainThread", frames=(inner, outer), main=True)
        return heartbeat.StackReply(
            key=command["key"], request=command["id"], source="py-spy", threads=(thread,)
        )
