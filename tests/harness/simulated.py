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
from hangwatch.protocol import codec, heartbeat

LATE_FRAME = Frame(
    function="load_batch", file="/u/train.py", line=44, text="return self._ready.get()"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedGroup:
    name: str
    desc: str
    ranks: str  # see `hangwatch.model.groups.pack_ranks`


def default_group(ranks: int) -> Callable[[int], list[SimulatedGroup]]:
    """One group of all ranks, as init_process_group makes it."""
    return lambda _: [SimulatedGroup(name="0", desc="default_pg", ranks=f"0-{ranks - 1}")]


@dataclass(slots=True, kw_only=True)
class SimulatedJob:
    """Trains, one step a second. ``late`` ranks do not come to the call that the others have
    entered. Every text may be set.
    """

    url: str
    ranks: int
    groups: Callable[[int], list[SimulatedGroup]]
    per_host: int = 8
    name: str = "run7"
    host: str = "node{}"
    op: str = "all_reduce"
    phase: str | None = None
    late_frame: Frame = LATE_FRAME  # where the late ranks are
    exception: ExceptionInfo | None = None  # how the late ranks end, if they do
    late_ranks: set[int] = field(default_factory=set)
    late_since: float = field(default_factory=time.monotonic)
    started_at: float = field(default_factory=time.monotonic)
    _heartbeat_numbers: dict[int, int] = field(default_factory=dict)
    _client: httpx.Client = field(
        default_factory=lambda: httpx.Client(trust_env=False, timeout=120)
    )

    @property
    def hosts(self) -> range:
        return range(-(-self.ranks // self.per_host))

    def hang_ranks(self, *ranks: int) -> None:
        self.late_ranks, self.late_since = set(ranks), time.monotonic()

    def resume_training(self) -> None:
        """Nobody is late any more."""
        self.late_ranks = set()

    def end_job(self) -> None:
        """Every process ends with exit status 0, and its node agents leave."""
        for host in self.hosts:
            ended = tuple(
                dataclasses.replace(p, ended=ExitInfo(exit_status=0))
                for p in self._process_updates(host, full=False)
            )
            self._post_heartbeat(host, processes=ended, gone=tuple(p.key for p in ended))
        self._client.close()

    def send_heartbeat(self, host: int, *, full: bool = False) -> None:
        """One host's heartbeat; what the server asks for is answered at once."""
        told = self._post_heartbeat(host, full=full, processes=self._process_updates(host, full))
        if told.get("resync") and not full:
            return self.send_heartbeat(host, full=True)
        samples = tuple(
            self._take_sample(c) for c in told.get("commands", ()) if c["ask"] == "stacks"
        )
        if samples:
            self._post_heartbeat(host, samples=samples)
        return None

    @contextmanager
    def sending_heartbeats(self, interval_s: float = 0.5) -> Iterator[None]:
        """Reports in the background for the length of the block."""
        over = threading.Event()

        def send_heartbeats() -> None:
            full = True
            while not over.is_set():
                with contextlib.suppress(
                    httpx.TransportError
                ):  # a server that is gone may come again, and asks for what it missed
                    for host in self.hosts:
                        self.send_heartbeat(host, full=full)
                    full = False
                over.wait(interval_s)

        thread = threading.Thread(target=send_heartbeats, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self._client.close()

    def _post_heartbeat(self, host: int, **fields: Any) -> dict[str, Any]:
        number = self._heartbeat_numbers[host] = self._heartbeat_numbers.get(host, 0) + 1
        beat = heartbeat.Heartbeat(
            host=self.host.format(host), agent=f"{self.name}-{host}", number=number, **fields
        )
        told: dict[str, Any] = (
            self._client.post(f"{self.url}/api/v1/heartbeats", json=codec.encode_message(beat))
            .raise_for_status()
            .json()
        )
        return told

    def _process_updates(self, host: int, full: bool) -> tuple[heartbeat.ProcessUpdate, ...]:
        mine = range(host * self.per_host, min(self.ranks, (host + 1) * self.per_host))
        return tuple(self._process_update(rank, full) for rank in mine)

    def _process_update(self, rank: int, full: bool) -> heartbeat.ProcessUpdate:
        now = time.monotonic()
        step = int((self.late_since if self.late_ranks else now) - self.started_at)
        late, waits = rank in self.late_ranks, bool(self.late_ranks) and rank not in self.late_ranks
        ended = ExitInfo(exit_status=1) if late and self.exception else None
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
            idle_s=now - self.late_since if self.late_ranks else 0.0,
            ended=ended,
            raised=self.exception if ended else None,
            sequences=tuple(
                self._stream_update(n, group, step, full, late, waits)
                for n, group in enumerate(self.groups(rank))
            ),
        )

    def _stream_update(
        self, uid: int, group: SimulatedGroup, step: int, full: bool, late: bool, waiting: bool
    ) -> heartbeat.StreamUpdate:
        waited = time.monotonic() - self.late_since
        entered = step + 1 if late or not waiting else step + 2
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
            completed=entered - 1 if waiting else entered,
            op=self.op,
            entered_s=waited if self.late_ranks else 0.0,
            pending_s=waited if waiting else None,
            calls=(
                (
                    Call(
                        seq=entered, signature=signature, site=site, entered_s=waited, blocking=True
                    ),
                )
                if waiting
                else ()
            ),
        )

    def _take_sample(self, command: dict[str, Any]) -> heartbeat.StackReply:
        late = int(command["key"].partition("-")[0]) - 1000 in self.late_ranks
        outer = Frame(function="main", file="/u/train.py", line=60)
        inner = (
            self.late_frame
            if late
            else Frame(function="step", file="/u/train.py", line=52, text="dist.all_reduce(grad)")
        )
        thread = ThreadStack(thread="MainThread", frames=(inner, outer), main=True)
        return heartbeat.StackReply(
            key=command["key"], request=command["id"], source="py-spy", threads=(thread,)
        )
