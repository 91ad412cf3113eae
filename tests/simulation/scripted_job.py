"""A job whose calls a test makes one by one, and whose heartbeats are applied directly to the state
that the diagnosis reads. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hangwatch.diagnosis import Diagnosis, diagnose
from hangwatch.model.calls import (
    Call,
    Signature,
    Site,
    StreamKind,
    extend_chain,
    with_agreement_hash,
)
from hangwatch.model.groups import pack_ranks
from hangwatch.model.limits import Limits
from hangwatch.model.operators import MustMatch
from hangwatch.model.ranks import ExceptionInfo, ExitInfo, Frame, ThreadStack
from hangwatch.model.verdicts import Verdict
from hangwatch.protocol import heartbeat as wire
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.fleet import Fleet

from .scripted_ranks import ScriptedRank, ScriptedStream, make_signature
from .scripted_updates import make_process_update

LIMITS = Limits(stall_after_s=10.0, slow_limit_s=60.0)


class ScriptedJob:
    """Ranks make calls at given times; `send_heartbeats` reports all of them, as node agents would."""

    def __init__(
        self,
        world_size: int,
        *,
        name: str = "job",
        limits: Limits = LIMITS,
        reports_completion: bool = True,
        fleet: Fleet | None = None,
        host: str = "node0",
        master: str = "",
    ) -> None:
        self.world_size = world_size
        self.reports_completion = reports_completion  # False: as on NCCL
        self.name = name
        self.limits = limits
        self.now = 100.0
        self.fleet = Fleet() if fleet is None else fleet  # may be shared with another job
        self.master = master
        self.ranks = {r: ScriptedRank(r, host=host) for r in range(world_size)}
        self.groups: dict[str, tuple[int, ...]] = {"world": tuple(range(world_size))}
        self._heartbeat_numbers: dict[str, int] = {}

    def add_group(self, name: str, ranks: tuple[int, ...]) -> str:
        self.groups[name] = ranks
        return name

    def make_call(
        self, rank: int, op: str = "all_reduce", *, group: str = "world", done: bool = False, blocking: bool | None = True,
        line: int = 10, backend: str = "gloo", thread: int = 0, **arguments: Any,
    ) -> None:  # fmt: skip
        """The rank enters a call now, and completes it if ``done``."""
        identity = wire.StreamIdentity(
            kind=StreamKind.COLLECTIVE,
            name=group,
            desc=group,
            ranks=pack_ranks(self.groups[group]),
            backend=backend,
        )
        self._enter_call(
            rank, group, identity, make_signature(op, **arguments), done, blocking, line
        )
        calls = self.ranks[rank].streams[group].calls
        calls[-1] = replace(calls[-1], thread=thread)

    def make_calls(
        self,
        op: str = "all_reduce",
        *,
        group: str = "world",
        except_ranks: tuple[int, ...] = (),
        done: bool = True,
        **arguments: Any,
    ) -> None:
        for rank in self.groups[group]:
            if rank not in except_ranks:
                self.make_call(rank, op, group=group, done=done, **arguments)

    def make_foreign_call(
        self, rank: int, number: int, op: str = "broadcast", *, store: str = "store", size: int = 2,
        done: bool = False, kind: StreamKind = StreamKind.COLLECTIVE, peer: int | None = None,
    ) -> None:  # fmt: skip
        """The rank makes a call as member ``number`` of a group that ``store`` identifies."""
        identity = wire.StreamIdentity(
            kind=kind,
            name="transfer",
            desc="undefined",
            ranks=pack_ranks(range(size)),
            backend="gloo",
            generation=0,
            foreign=store,
            number=number,
            peer=peer,
        )
        key = f"{store} {kind.value} {peer}"
        self._enter_call(rank, key, identity, make_signature(op), done, True, 30)

    def make_p2p_call(
        self,
        rank: int,
        kind: StreamKind,
        peer: int,
        *,
        tag: int = 0,
        done: bool = False,
        blocking: bool | None = None,
        **arguments: Any,
    ) -> None:
        identity = wire.StreamIdentity(
            kind=kind,
            name="world",
            desc="world",
            ranks=pack_ranks(self.groups["world"]),
            peer=peer,
            tag=tag,
        )
        self._enter_call(
            rank,
            f"{kind.value}{peer}/{tag}",
            identity,
            make_signature(kind.value, **arguments),
            done,
            blocking,
            20,
        )

    def make_setup_call(
        self, rank: int, op: str = "init_process_group", *, done: bool = True, ranks: tuple[int, ...] | None = None,
        world: int | None = None, nth: int = 1,
    ) -> None:  # fmt: skip
        """In the ``nth`` world of that size, which has the first ranks."""
        size = self.world_size if world is None else world
        identity = wire.StreamIdentity(
            kind=StreamKind.SETUP,
            name="setup",
            desc="set-up",
            ranks=pack_ranks(range(size)),
            generation=nth,
            world=world or 0,
        )
        detail = None if ranks is None else f"ranks={pack_ranks(ranks)}"
        place = "setup" if world is None else f"setup {world}/{nth}"
        self._enter_call(
            rank,
            place,
            identity,
            with_agreement_hash(Signature(op=op, detail=detail), MustMatch.NOTHING, ()),
            done,
            True,
            1,
        )

    def report_device(
        self, rank: int, completed: int, started: int | None = None, *, group: str = "world"
    ) -> None:
        """Sets the counters of the rank's device; its calls are complete only by these."""
        stream = self.ranks[rank].streams[group]
        stream.device = wire.DeviceStatus(
            uid=stream.uid, enqueued=len(stream.calls), started=started, completed=completed
        )

    def lose_call(self, rank: int, key: str = "world") -> None:
        """The recorder of the rank fails to record a call of the stream now, and knows it."""
        stream = self.ranks[rank].streams[key]
        stream.lost_from_seq = stream.lost_from_seq or len(stream.calls) + 1

    def complete_calls(self, rank: int, group: str = "world") -> None:
        stream = self.ranks[rank].streams[group]
        stream.completed = len(stream.calls)

    def end_process(
        self,
        rank: int,
        *,
        signal: int | None = None,
        status: int | None = None,
        exception: ExceptionInfo | None = None,
    ) -> None:
        process = self.ranks[rank]
        process.alive = False
        process.exit, process.exited_at = ExitInfo(signal=signal, exit_status=status), self.now
        if exception is not None:
            process.exception, process.exception_at = exception, self.now

    def advance_time(self, seconds: float) -> None:
        self.now += seconds

    def report_stack(self, rank: int, *frames: Frame) -> None:
        """A sample of the rank's main thread shows these frames now, innermost first."""
        self.report_stacks(rank, frames)

    def report_stacks(self, rank: int, *threads: Iterable[Frame]) -> None:
        """A sample of the rank's threads shows these frames now, the main thread first. The calls of
        the ``n``-th thread, from 1, are those that were made with ``thread=n``.
        """
        callers = self._list_callers(rank)
        stacks = tuple(
            ThreadStack(
                thread=f"Thread-{n}" if n else "MainThread",
                frames=tuple(frames),
                main=not n,
                call_recency=list(callers).index(n + 1) if n + 1 in callers else None,
                called_uids=tuple(callers.get(n + 1, ())),
            )
            for n, frames in enumerate(threads)
        )
        self.apply_heartbeat(
            host=self.ranks[rank].host,
            agent=f"agent-{self.ranks[rank].host}",
            samples=(
                wire.StackReply(key=f"{rank}-1", request="r", source="py-spy", threads=stacks),
            ),
        )

    def _list_callers(self, rank: int) -> dict[int, list[int]]:
        """The threads with numbers that made calls, that of the newest call first, each with the
        uids of the streams whose newest call it made.
        """
        used = [stream for stream in self.ranks[rank].streams.values() if stream.calls]
        used.sort(key=lambda stream: -stream.entered_at[-1])
        callers: dict[int, list[int]] = {}
        for stream in used:
            if thread := stream.calls[-1].thread:
                callers.setdefault(thread, []).append(stream.uid)
        return callers

    def send_heartbeats(self) -> None:
        by_agent: dict[tuple[str, str], list[wire.ProcessUpdate]] = {}
        for rank in self.ranks.values():
            if rank.is_reporting:
                by_agent.setdefault((rank.host, rank.agent or f"agent-{rank.host}"), []).append(
                    self.make_process_update(rank)
                )
        for (host, agent), updates in by_agent.items():
            self.apply_heartbeat(host=host, agent=agent, processes=tuple(updates))

    def make_process_update(self, rank: ScriptedRank) -> wire.ProcessUpdate:
        return make_process_update(
            rank,
            self.now,
            job=self.name,
            world_size=self.world_size,
            reports_completion=self.reports_completion,
            master=self.master,
        )

    def run_diagnosis(self) -> Diagnosis:
        return diagnose(self.latest_attempt, self.now, self.limits)

    def list_due_verdicts(self) -> list[Verdict]:
        """The verdicts that are confirmed now, after heartbeats and the requested evidence."""
        self.send_heartbeats()
        for _ in range(4):
            requests = [r for r in self.run_diagnosis().requests if not (r.stacks or r.hardware)]
            for request in requests:
                streams = self.ranks[request.rank].streams.values()
                stream = next(s for s in streams if s.uid == request.stream_uid)
                calls = tuple(
                    call
                    for call in stream.list_calls(self.now)
                    if request.from_seq <= call.seq <= request.to_seq
                    and call.seq % request.step == 0
                )
                host = self.ranks[request.rank].host
                self.apply_heartbeat(
                    host=host,
                    agent=f"agent-{host}",
                    calls=(
                        wire.CallsReply(
                            key=f"{request.rank}-1",
                            request="c",
                            uid=request.stream_uid,
                            calls=calls,
                            from_seq=request.from_seq,
                            to_seq=request.to_seq,
                            step=request.step,
                        ),
                    ),
                )
        return [v for v in self.run_diagnosis().verdicts if v.is_confirmed]

    @property
    def latest_attempt(self) -> Attempt:
        attempt = self.fleet.latest_attempt(self.name)
        assert attempt is not None
        return attempt

    def _enter_call(
        self,
        rank: int,
        key: str,
        identity: wire.StreamIdentity,
        signature: Signature,
        done: bool,
        blocking: bool | None,
        line: int,
    ) -> None:
        streams = self.ranks[rank].streams
        stream = streams.setdefault(key, ScriptedStream(uid=len(streams) + 1, identity=identity))
        chain_before = stream.calls[-1].chain if stream.calls else 0
        site = Site(file="train.py", line=line, function="step")
        stream.calls.append(
            Call(
                seq=len(stream.calls) + 1,
                signature=signature,
                site=site,
                chain=extend_chain(chain_before, signature.agree),
                blocking=blocking,
            )
        )
        stream.entered_at.append(self.now)
        if done:
            stream.completed = len(stream.calls)

    def apply_heartbeat(
        self, host: str = "node0", agent: str = "agent-node0", **parts: object
    ) -> None:
        self._heartbeat_numbers[agent] = number = self._heartbeat_numbers.get(agent, 0) + 1
        beat = wire.Heartbeat(host=host, agent=agent, number=number, **parts)  # type: ignore[arg-type]
        assert self.fleet.apply_heartbeat(beat, self.now)
