"""The node agent's loop: reads, tells the server what changed, does what the server asks, and
leaves after its ranks.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hangwatch.protocol import heartbeat

from ..environment import run_dir
from .discovery.watched import Watched
from .discovery.watchlist import Watchlist
from .reporting import performance, terse, updates
from .reporting.changes import News
from .reporting.outbox import Outbox
from .reporting.uplink import Outcome, Target, Uplink, backoff_s
from .requests.aborts import Aborts
from .requests.builder import Builder
from .requests.live import Live
from .stacks import faulthandler_dumps
from .stacks.pyspy import PySpy
from .stacks.sampler import Order, Sampler
from .system import cost, processes
from .system.log import Log

COST_EVERY = 20  # heartbeats
_FRESH_NS = 150_000_000  # what was read so lately is told as it is
# a look waits so long for the heartbeat that tells of it: to be woken twice costs more than either
_TOGETHER_NS = 50_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """All of the agent's own times, in seconds."""

    scan: float = 0.5  # between two looks
    brisk: float = 0.2  # the same while processes come, or where a ring fills fast
    settled: float = 10.0  # after which no more processes are expected
    interval: float = 0.5  # until the server says another one
    linger: float = 3.0  # without a live process
    begin: float = 5.0  # without a first one
    absent_server: float = 30.0  # with something left to report
    notice: float = 3.0  # without the server, until the user is told
    last_beat: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """A heartbeat that was handed to the uplink."""

    beat: heartbeat.Heartbeat
    told: dict[str, updates.Told | None] = field(default_factory=dict)


class Agent:
    """Watches one run dir. Everything happens in the thread that calls `run`; others only wake it."""

    def __init__(
        self,
        folder: Path,
        target: Target,
        pyspy: PySpy,
        log: Log,
        *,
        proc: str = processes.PROC,
        timing: Timing | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        held: dict[str, int] | None = None,
    ) -> None:
        """``held``: pidfds, by key, of processes that were held before there was time to watch
        them; they are closed here.
        """
        self._folder = folder
        self._log = log
        self._proc = proc
        self._timing = timing or Timing()
        self._clock = clock
        self._host = socket.gethostname()
        self._id = secrets.token_hex(8)
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._list = Watchlist(folder, self._selector, log, proc=proc, held=held)
        self._live = Live(pyspy, self.wake)
        self._sampler = Sampler(pyspy, self.wake, self._live.recordings.make_way)
        self._builder = Builder(log)
        self._uplink = Uplink(target, self.wake)
        self._outbox = Outbox()
        self._aborts = Aborts()
        self._performance = performance.Reporter()
        self._probed: set[str] = set()
        self._commands: deque[str] = deque(
            maxlen=1024
        )  # those that were taken up: the server may repeat itself
        self._flight: Flight | None = None
        self._number = 0
        self._full = True
        self._urgent = False
        self._news = News()
        self._has_news = False  # it is urgent
        self._awaited = False  # the server waits for it
        self._brief_until_ns = 0
        self._failures = self._refusals = 0
        self._lost_ns = 0
        self._problem = ""
        self._noticed = False
        self._stop = False
        now = clock()
        self._next_scan = self._next_post = now
        self._read_ns = 0
        self._found_ns = now  # a process was found
        self._alive_ns = now
        self._ever_alive = False

    def wake(self) -> None:
        """Makes the loop look around; from any thread, or a signal handler."""
        with contextlib.suppress(BlockingIOError):  # full: it will look in any case
            os.write(self._wake, b"\0")

    def stop(self) -> None:
        """Ends `run` soon, after a last heartbeat."""
        self._stop = True
        self.wake()

    def run(self) -> None:
        """Until every rank has gone and their end is told, or `stop`."""
        while not self._stop:
            now = self._clock()
            if now >= self._next_look:
                self._look(now)
            self._take_results()
            if (outcome := self._uplink.outcome()) is not None:
                self._landed(outcome, now)
            if not self._uplink.busy and now >= self._next_post - (
                self._hurry_ns if self._urgent else 0
            ):
                self._post(now)
            if self._may_leave(now):
                break
            self._wait(now)
        self._last_beat()
        self._live.recordings.close()
        self._list.close()
        self._uplink.close()

    @property
    def _next_look(self) -> int:
        together = (
            not self._uplink.busy
            and self._next_scan <= self._next_post < self._next_scan + _TOGETHER_NS
        )
        return self._next_post if together else self._next_scan

    @property
    def _hurry_ns(self) -> int:
        """How much earlier than planned an urgent heartbeat may go: at any time, but not while the
        server is away.
        """
        return 0 if self._failures else 60_000_000_000

    def _wait(self, now: int) -> None:
        until = self._next_look if self._uplink.busy else min(self._next_look, self._next_post)
        for key, _ in self._selector.select(max(0.0, (until - now) / 1e9)):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):  # somebody else emptied it
                    os.read(self._woken, 4096)
            elif (w := self._list.watched.get(key.data)) is not None:
                self._list.end(w, self._clock())
                self._urgent = True

    def _look(self, now: int) -> None:
        fresh = self._list.scan(now)
        self._urgent |= any(w.ended is not None for w in fresh)
        self._urgent |= self._list.read(now)
        self._read_ns = now
        if (
            not self._failures
            and (news := self._news.look(self._list.watched.values())) is not None
        ):
            within_s, self._has_news = news
            self._next_post = min(self._next_post, now + int(within_s * 1e9))
        if fresh:
            self._found_ns = now
        brisk = now - self._found_ns < self._timing.settled * 1e9 or any(
            w.flooded for w in self._list.watched.values()
        )
        self._next_scan = now + int((self._timing.brisk if brisk else self._timing.scan) * 1e9)
        self._list.clean_up(now)
        self._tell_user(now)
        for w in self._list.watched.values():
            ready = (
                w.key not in self._probed
                and w.ended is None
                and w.snapshot is not None
                and w.identity is not None
            )
            if ready and self._sampler.submit(self._order(w)):
                self._probed.add(w.key)
            if w.snapshot is not None:
                self._builder.look(w.snapshot.identity)
        self._probed &= self._list.watched.keys()
        if self._list.alive:
            self._alive_ns, self._ever_alive = now, True

    def _order(self, w: Watched, request: str | None = None, native: bool = False) -> Order:
        registration = (
            faulthandler_dumps.Registration.read(w.snapshot.identity) if w.snapshot else None
        )
        path = w.ring.stacks_path if w.ring else None
        return Order(
            key=w.key, pid=w.pid, start_ticks=w.start_ticks, request=request, native=native,
            registration=registration, stacks_path=path,
        )  # fmt: skip

    def _take_results(self) -> None:
        self._urgent |= self._live.take_results()
        for result in self._sampler.results():
            w = self._list.watched.get(result.key)
            if result.continued:
                self._log.warning(f"py-spy left process {result.key} stopped: it was continued")
            if w is not None and result.refused:
                fallback = (
                    faulthandler_dumps.Registration.read(w.snapshot.identity)
                    if w.snapshot
                    else None
                )
                w.faults["stacks"] = result.refused + (
                    " (until then stacks come from faulthandler)" if fallback else ""
                )
                self._log.once(result.refused)
            if result.sample is not None:
                self._outbox.add_sample(result.sample, result.taken_ns)
                self._urgent = True
        self._urgent |= self._aborts.look(self._list.watched, self._clock())

    def _post(self, now: int) -> None:
        if now - self._read_ns > _FRESH_NS:
            self._look(now)
        self._flight = self._compose(now)
        urgent, self._urgent, self._has_news = (
            self._urgent or self._has_news or self._awaited,
            False,
            False,
        )
        self._news.told(self._list.watched.values())
        self._next_post = now + int(self._timing.interval * 1e9)
        self._uplink.post(
            self._flight.beat.number,
            heartbeat.encode_message(self._flight.beat),
            urgent=urgent,
            patient=self._news.wanted,
        )

    def _compose(self, now: int, *, leaving: bool = False) -> Flight:
        told: dict[str, updates.Told | None] = {}
        parts: dict[str, heartbeat.ProcessUpdate | None] = {}
        for key, w in self._list.watched.items():
            w.paused = self._live.recordings.paused(key)
            parts[key], told[key] = w.compose(now)
        self._number += 1
        gone = self._list.gone + [
            key for key, w in self._list.watched.items() if leaving and w.ended is not None
        ]
        brief = bool(parts) and not self._full and not gone and now < self._brief_until_ns
        if brief := brief and all(
            terse.gets_on(w.snapshot, w.told, parts[k], told[k])
            for k, w in self._list.watched.items()
        ):
            shortened = {
                k: terse.shortened(w.snapshot, w.told, parts[k], told[k])
                for k, w in self._list.watched.items()
            }
            parts, told = (
                {k: part for k, (part, _) in shortened.items()},
                {k: known for k, (_, known) in shortened.items()},
            )
        beat = heartbeat.Heartbeat(
            host=self._host, agent=self._id, number=self._number, full=self._full, brief=brief, gone=tuple(gone),
            processes=tuple([part for part in parts.values() if part is not None]), samples=self._outbox.samples(now),
            calls=self._outbox.calls(), aborts=self._aborts.told(), sent_s=round(now / 1e9, 3),
            traces=self._live.traces(self._list.watched, now), recordings=self._live.recorded(),
            cost=cost.own(self._outbox.dropped) if self._number % COST_EVERY == 1 else None,
            performance=self._performance.due(now, {key: w.tally for key, w in self._list.watched.items()}, at_once=leaving),
        )  # fmt: skip
        return Flight(beat=beat, told=told)

    def _landed(self, outcome: Outcome, now: int) -> None:
        flight, self._flight = self._flight, None
        if flight is None or outcome.number != flight.beat.number:
            return
        if outcome.reply is None:
            self._failed(flight, outcome, now)
            return
        self._found()
        self._extras_delivered(flight)
        reply = outcome.reply
        self._performance.answered(outcome)
        self._next_post = now + int(reply.interval_s * 1e9)
        self._news.answered(self._list.watched.values(), reply.news_s)
        self._awaited = reply.urgent
        self._brief_until_ns = now + int((reply.details_s or 0.0) * 1e9)
        if reply.resync:
            for w in self._list.watched.values():
                w.forget()
            self._read_ns = 0
            if not self._full:
                self._next_post = now
            self._full = True
        else:
            self._acknowledged(flight, now)
        for command in reply.commands:
            self._obey(command, now)

    def _acknowledged(self, flight: Flight, now: int) -> None:
        self._full = False
        for key, told in flight.told.items():
            if (w := self._list.watched.get(key)) is not None:
                w.acknowledged(told, now)

    def _extras_delivered(self, flight: Flight) -> None:
        self._outbox.delivered(flight.beat.samples, flight.beat.calls)
        self._aborts.delivered(flight.beat.aborts)
        self._live.delivered(flight.beat)
        self._performance.delivered(flight.beat.performance)
        self._list.gone = [key for key in self._list.gone if key not in flight.beat.gone]

    def _failed(self, flight: Flight, outcome: Outcome, now: int) -> None:
        self._failures += 1
        self._next_post = now + int((outcome.retry_after_s + backoff_s(self._failures)) * 1e9)
        if outcome.refused:
            # The same again would be refused again: first without what was added to it, then
            # without all of it.
            self._refusals += 1
            self._extras_delivered(flight)
            if self._refusals > 1:
                self._acknowledged(flight, now)
        if not self._lost_ns:
            self._lost_ns = now
            self._problem = outcome.problem
            self._log.warning(f"{outcome.problem}; the job runs on, heartbeats are tried again")

    def _found(self) -> None:
        self._failures = self._refusals = 0
        if self._lost_ns:
            self._lost_ns = 0
            self._log.info(f"{self._uplink.target} answers again")
            with contextlib.suppress(OSError):  # a rank has taken it
                (self._folder / run_dir.NOTICE).unlink()

    def _tell_user(self, now: int) -> None:
        """Leaves a line for a rank to print, once the server has been away for a while: the ranks
        have the user's terminal.
        """
        if self._noticed or not self._lost_ns or (now - self._lost_ns) / 1e9 < self._timing.notice:
            return
        self._noticed = True
        path = self._folder / run_dir.NOTICE
        try:
            path.with_suffix(".new").write_text(
                f"{self._problem}; the job runs on, unwatched until the server answers\n"
            )
            path.with_suffix(".new").replace(path)
        except OSError as error:
            self._log.once(f"the notice for the user cannot be written: {error.strerror}")

    def _obey(self, command: heartbeat.Command, now: int) -> None:
        if command.id in self._commands:
            return
        self._commands.append(command.id)
        w = self._list.watched.get(command.key)
        if command.ask in (heartbeat.CommandKind.TRACE, heartbeat.CommandKind.RECORD):
            self._live.obey(command, w, now)
            return
        if command.ask is heartbeat.CommandKind.CALLS:
            calls = tuple(w.calls(now, command.uid, command.from_seq, command.most)) if w else ()
            self._outbox.add_calls(
                heartbeat.CallsReply(
                    key=command.key, request=command.id, uid=command.uid, calls=calls
                )
            )
            self._urgent = True
            return
        if command.ask is heartbeat.CommandKind.ABORT:
            self._log.info(f"the server orders process {command.key} to be ended")
            self._aborts.obey(command, w, now)
            self._urgent = True
            return
        why = (
            "this node agent knows no such process"
            if w is None
            else "the process has ended"
            if w.ended
            else None
        )
        if why is None and w is not None:
            if self._sampler.submit(self._order(w, command.id, command.native)):
                return
            why = "too many stack dumps are waiting on this node: ask again later"
        failed = heartbeat.StackReply(
            key=command.key, request=command.id, source="py-spy", native=command.native, error=why
        )
        self._outbox.add_sample(failed, now)
        self._urgent = True

    def _may_leave(self, now: int) -> bool:
        idle = (now - self._alive_ns) / 1e9
        if self._list.alive or idle < (
            self._timing.linger if self._ever_alive or self._list.watched else self._timing.begin
        ):
            return False
        unreported = any(
            w.identity is not None and not w.reported_ns for w in self._list.watched.values()
        )
        waiting = self._outbox or self._aborts or self._live or self._uplink.busy
        if (unreported or waiting) and idle < self._timing.absent_server:
            return False
        return not self._list.scan(now)

    def _last_beat(self) -> None:
        """Sends what is known. Whoever ended this agent will not wait long."""
        if (
            self._uplink.busy
            and (outcome := self._uplink.outcome(self._timing.last_beat)) is not None
        ):
            self._landed(outcome, self._clock())
        self._take_results()
        if not self._uplink.busy:
            flight = self._compose(self._clock(), leaving=True)
            self._uplink.post(
                flight.beat.number, heartbeat.encode_message(flight.beat), urgent=True
            )
            if (
                last := self._uplink.outcome(self._timing.last_beat)
            ) is not None and last.reply is not None:
                self._acknowledged(flight, self._clock())
        if not self._list.alive:
            self._list.remove_all()
