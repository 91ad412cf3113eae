"""Recordings on request: who was asked where it spends its time, how far that has come, and what
came of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from hangwatch.protocol import heartbeat
from hangwatch.protocol.live import RecordingReply
from hangwatch.stacks.call_tree import ProfileNode, build_call_tree, find_hottest_functions
from hangwatch.stacks.profile import Profile, ThreadProfile, unpack_profile
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.process import Process

from ..core.clock import Clock, ulid
from ..core.schema import Frame
from ..ingest.command_queue import CommandQueue
from . import schema as schema

PATIENCE = 20.0  # seconds for a node agent to begin: hosts of a large job report every six
OVER, NATIVE_OVER = (
    25.0,
    60.0,
)  # seconds for one rank besides those that are recorded: a node records one after the other
KEPT, KEPT_BYTES = 20, 64 << 20  # of what node agents sent


@dataclass(slots=True, kw_only=True)
class _Rank:
    rank: int
    agent: str = ""
    status: str = "waiting"  # waiting, recording, done, failed
    due: float = 0.0  # when it should be over
    told: RecordingReply | None = None
    error: str | None = None
    shown: schema.RecordedRank | None = (
        None  # once it was asked for: a profile takes a while to fold
    )


@dataclass(slots=True, kw_only=True)
class Kept:
    id: str
    job: str
    attempt: int
    wanted: schema.RecordingRequest
    created_at: datetime
    ranks: dict[int, _Rank] = field(default_factory=dict)
    requests: dict[str, int] = field(default_factory=dict)  # request -> rank

    @property
    def pending(self) -> bool:
        return any(r.status in ("waiting", "recording") for r in self.ranks.values())

    @property
    def size(self) -> int:
        return sum(len(r.told.profile) for r in self.ranks.values() if r.told is not None)


@dataclass(slots=True, kw_only=True)
class Recordings:
    clock: Clock
    desk: CommandQueue
    kept: dict[str, Kept] = field(default_factory=dict)

    def under_way(self, attempt: Attempt, ranks: Sequence[int], now: float) -> str | None:
        """The id of a recording that keeps a host of these ranks busy: a host records one process
        at a time.
        """
        agents = {attempt.processes[rank].agent for rank in ranks}
        for recording in self.kept.values():
            self._expire(recording, now)
            if any(
                r.agent in agents and r.status in ("waiting", "recording")
                for r in recording.ranks.values()
            ):
                return recording.id
        return None

    def ask(self, attempt: Attempt, wanted: schema.RecordingRequest, now: float) -> Kept:
        """Asks the node agents of ``wanted.ranks``, each of which must be in ``attempt.ranks``."""
        made = Kept(
            id=ulid(self.clock.wall()),
            job=attempt.job,
            attempt=attempt.number,
            wanted=wanted,
            created_at=self.clock.date(now),
        )
        before: dict[str, int] = {}  # ranks that the same node agent records first
        for rank in dict.fromkeys(wanted.ranks):
            process = attempt.processes[rank]
            if process.exit is not None:
                gone = (
                    f"the process of rank {rank} (pid {process.identity.pid} on {process.host}) has"
                    " ended: it spends no time any more"
                )
                made.ranks[rank] = _Rank(rank=rank, status="failed", error=gone)
                continue
            place = before[process.agent] = before.get(process.agent, 0) + 1
            made.ranks[rank] = _Rank(
                rank=rank, agent=process.agent, due=now + PATIENCE + place * self._longest(wanted)
            )
            made.requests[self._request(process, wanted, now)] = rank
        self.kept[made.id] = made
        self._bound()
        return made

    def _request(self, process: Process, wanted: schema.RecordingRequest, now: float) -> str:
        return self.desk.ask(
            process,
            heartbeat.Command(
                id=ulid(self.clock.wall()),
                ask=heartbeat.CommandKind.RECORD,
                key=process.key,
                seconds=wanted.seconds,
                rate=wanted.rate,
                native=wanted.native,
                gil=wanted.gil,
            ),
            now,
        )

    def stop(self, recording: Kept, attempt: Attempt, now: float) -> None:
        """Ends what of it has not ended: with what there is by then."""
        for request, number in recording.requests.items():
            rank, process = recording.ranks[number], attempt.processes.get(number)
            if rank.status in ("waiting", "recording") and process is not None:
                self.desk.ask(
                    process,
                    heartbeat.Command(
                        id=ulid(self.clock.wall()),
                        ask=heartbeat.CommandKind.RECORD,
                        key=process.key,
                        ends=request,
                    ),
                    now,
                )
                rank.due = min(rank.due, now + PATIENCE)

    def _longest(self, wanted: schema.RecordingRequest) -> float:
        return wanted.seconds + (NATIVE_OVER if wanted.native else OVER)

    def _bound(self) -> None:
        while len(self.kept) > 1 and (
            len(self.kept) > KEPT or sum(r.size for r in self.kept.values()) > KEPT_BYTES
        ):
            del self.kept[next(iter(self.kept))]

    def take(self, told: Sequence[RecordingReply], now: float) -> None:
        """Takes the answers out of a heartbeat."""
        for each in told:
            for recording in self.kept.values():
                if (number := recording.requests.get(each.request)) is not None:
                    self._answer(recording, recording.ranks[number], each, now)
        if told:
            self._bound()

    def _answer(self, recording: Kept, rank: _Rank, told: RecordingReply, now: float) -> None:
        if rank.status in ("done", "failed"):  # a heartbeat that came twice
            return
        if told.begun:
            rank.status, rank.due = "recording", now + self._longest(recording.wanted)
        else:
            rank.status, rank.told, rank.error = (
                "failed" if told.error else "done",
                told,
                told.error,
            )

    def _expire(self, recording: Kept, now: float) -> None:
        for rank in recording.ranks.values():
            if rank.status in ("waiting", "recording") and now > rank.due:
                what = "begin" if rank.status == "waiting" else "end"
                rank.error = (
                    f"its node agent did not {what} it in time: see that hangwatch's agent runs on"
                    " its host"
                )
                rank.status = "failed"

    def find(self, id: str, now: float) -> Kept | None:
        recording = self.kept.get(id)
        if recording is not None:
            self._expire(recording, now)
        return recording


def describe(recording: Kept) -> schema.Recording:
    """As the API answers it. It may take a while: run it in a thread."""
    return schema.Recording(
        id=recording.id,
        job=recording.job,
        attempt=recording.attempt,
        status="pending" if recording.pending else "done",
        created_at=recording.created_at,
        ranks=[_shown(rank) for rank in recording.ranks.values()],
        **recording.wanted.model_dump(include={"seconds", "rate", "native", "gil"}),
    )


def profiles(recording: Kept) -> list[tuple[int, Profile]]:
    """The profiles that there are, by rank. It may take a while, too."""
    found = []
    for rank in recording.ranks.values():
        if rank.told is not None and rank.told.profile:
            with contextlib.suppress(ValueError):  # `describe` says so
                found.append((rank.rank, unpack_profile(rank.told.profile)))
    return found


def _shown(rank: _Rank) -> schema.RecordedRank:
    if rank.shown is None or rank.shown.status != rank.status:
        rank.shown = _describe(rank)
    return rank.shown


def _describe(rank: _Rank) -> schema.RecordedRank:
    told = rank.told
    if told is None or not told.profile:
        return schema.RecordedRank.model_validate(
            {"rank": rank.rank, "status": rank.status, "error": rank.error}
        )
    try:
        profile = unpack_profile(told.profile)
    except ValueError as error:
        why = (
            f"its node agent's answer is not understood ({error}): install the same release of"
            " hangwatch on both sides"
        )
        return schema.RecordedRank(rank=rank.rank, status="failed", error=why)
    note = told.note or (
        f"{profile.dropped_samples} samples of rare stacks were left out"
        if profile.dropped_samples
        else ""
    )
    return schema.RecordedRank(
        rank=rank.rank,
        status="done",
        note=note,
        seconds=told.seconds,
        threads=[_thread(thread) for thread in profile.shown_threads],
        resting=len(profile.threads) - len(profile.shown_threads),
    )


def _thread(thread: ThreadProfile) -> schema.ThreadTime:
    return schema.ThreadTime(
        thread=thread.thread,
        main=thread.is_main,
        samples=thread.sample_count,
        hottest=[
            schema.HotFunction(function=f.function, file=f.file, line=f.line, samples=n)
            for f, n in find_hottest_functions(thread.stacks)
        ],
        tree=[_node(node) for node in build_call_tree(thread.stacks)],
    )


def _node(node: ProfileNode) -> schema.FunctionTime:
    ends = node.leaf_frame
    return schema.FunctionTime(
        function=node.function,
        file=node.file,
        library=node.library,
        samples=node.samples,
        own=node.own_samples,
        lines=[schema.LineTime(line=line, samples=samples) for line, samples in node.lines],
        ends=(
            None if ends is None else Frame(function=ends.function, file=ends.file, line=ends.line)
        ),
        children=[_node(child) for child in node.children],
    )
