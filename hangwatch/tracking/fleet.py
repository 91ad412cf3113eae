"""What heartbeats change: every job that is known, in whatever order they come. Pure: the time is
passed in.

All times are seconds on one monotonic clock, the caller's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from sys import intern

from hangwatch.model.calls import Call
from hangwatch.model.limits import MIN_WAIT_S, STOPPED_STATES
from hangwatch.model.ranks import Lifecycle
from hangwatch.protocol import heartbeat
from hangwatch.protocol.clocks import MAX_CLOCK_DRIFT

from .attempt import Attempt
from .call_stream import CHECKPOINTS_KEPT, CHECKPOINTS_SPARE, MAX_URGENT_SUSPECTS, CallStream
from .process import IDLE_AFTER_S, Process, StackSample

CALLS_KEPT_PER_STREAM = 256  # of a sequence
# that are over, where none were asked for: a job of which each call takes a while tells all of them
FINISHED_CALLS_KEPT = 8
SAMPLES_KEPT_PER_PROCESS = 4
FORMER_ATTEMPTS_KEPT = 1000  # jobs
FORGOTTEN_PROCESSES_KEPT = 1 << 17  # processes that may still be spoken of


@dataclass(frozen=True, slots=True, kw_only=True)
class FormerAttempt:
    """The last attempt of a job that is not in memory: numbers go on from it."""

    number: int
    restart: int
    last_seen_at: float
    is_finished: bool


@dataclass(slots=True)
class Fleet:
    """Every job. `apply` is the only way in."""

    attempts: dict[tuple[str, int], Attempt] = field(default_factory=dict)
    processes: dict[tuple[str, str], tuple[Process, Attempt]] = field(
        default_factory=dict
    )  # by (host, key)
    former_attempts: dict[str, FormerAttempt] = field(default_factory=dict)  # by job
    _last_heartbeats: dict[str, int] = field(
        default_factory=dict
    )  # the last heartbeat of each agent
    # The processes that each agent speaks for, as `processes` has them.
    _processes_by_agent: dict[str, dict[tuple[str, str], tuple[Process, Attempt]]] = field(
        default_factory=dict
    )
    _clock_gaps: dict[str, tuple[float, float]] = field(
        default_factory=dict
    )  # by agent: its clock from this one, at the least, and when
    _forgotten_processes: dict[tuple[str, str], None] = field(
        default_factory=dict
    )  # alive by their last word, of attempts that were dropped

    def latest_attempt(self, job: str) -> Attempt | None:
        mine = [a for (name, _), a in self.attempts.items() if name == job]
        return max(mine, key=lambda a: a.number) if mine else None

    def apply_heartbeat(self, heartbeat: heartbeat.Heartbeat, now: float) -> bool:
        """Takes a heartbeat in. False asks for a resync: it spoke of a process or a sequence that
        is not known here.

        A heartbeat that comes again, or after a later one of the same agent, changes nothing but is
        no error.
        """
        if heartbeat.number <= self._last_heartbeats.get(heartbeat.agent, 0):
            return True
        self._last_heartbeats[heartbeat.agent] = heartbeat.number
        now = self._estimate_sent_at(heartbeat, now)
        self._mark_seen(heartbeat, now)
        complete = True
        for update in heartbeat.processes:
            if (heartbeat.host, update.key) not in self._forgotten_processes:
                complete &= (
                    self._apply_process(heartbeat, update, now)
                    if not heartbeat.brief
                    else self._apply_terse_update(heartbeat.host, update, now)
                )
        for sample in heartbeat.samples:
            self._apply_sample(heartbeat.host, sample, now)
        for reply in heartbeat.calls:
            self._apply_calls(heartbeat.host, reply)
        for key in heartbeat.gone:
            if (held := self.processes.get((heartbeat.host, key))) is not None:
                held[0].finished_reporting = True
        if not heartbeat.brief:
            self._update_suspects(heartbeat.agent)
        return complete

    def _update_suspects(self, agent: str) -> None:
        for process, attempt in self._processes_by_agent.get(agent, {}).values():
            attempt.update_suspects(process)

    def _estimate_sent_at(self, heartbeat: heartbeat.Heartbeat, now: float) -> float:
        """When a heartbeat was sent: it took longer than the agent's quickest by so much, give or
        take the clocks' drift.
        """
        if heartbeat.sent_s is None:
            return now
        apart = now - heartbeat.sent_s
        least, at = self._clock_gaps.get(heartbeat.agent, (apart, now))
        least = min(apart, least + MAX_CLOCK_DRIFT * (now - at))
        self._clock_gaps[heartbeat.agent] = (least, now)
        return heartbeat.sent_s + least

    def _mark_seen(self, heartbeat: heartbeat.Heartbeat, now: float) -> None:
        """The node agent is alive: all that it said before still holds, or its processes have got
        further.
        """
        for process, attempt in self._processes_by_agent.get(heartbeat.agent, {}).values():
            if process.exit is None:
                process.previously_seen_at = max(process.last_seen_at, process.last_progress_at)
                if heartbeat.brief:
                    process.last_progress_at = now
                else:
                    process.last_seen_at = now
                if attempt.last_seen_at != now:
                    attempt.mark_seen(now)

    def mark_refused(self, agent: str, now: float) -> None:
        """A node agent is there, though what it says could not be taken in."""
        for process, _ in self._processes_by_agent.get(agent, {}).values():
            process.last_refused_at = now

    def forget_attempt(self, attempt: Attempt) -> None:
        """Drops an attempt; its processes are dropped by `dismantle`."""
        self.attempts.pop((attempt.job, attempt.number), None)
        if self.latest_attempt(attempt.job) is None:
            self.former_attempts[attempt.job] = FormerAttempt(
                number=attempt.number,
                restart=attempt.restart,
                last_seen_at=attempt.last_seen_at,
                is_finished=attempt.is_finished,
            )
            while len(self.former_attempts) > FORMER_ATTEMPTS_KEPT:
                del self.former_attempts[next(iter(self.former_attempts))]

    def drop_processes(self, attempt: Attempt, max_processes: int) -> bool:
        """Drops some of a forgotten attempt's processes: for 100,000 at once it takes long. False
        once there are none left.

        They are taken apart: what refers to one another would stay until the garbage collector
        looks at all that there is.
        """
        for _ in range(min(max_processes, len(attempt.processes))):
            self._drop_process(attempt.processes.popitem()[1])
        if attempt.processes:
            return True
        for former in [process for process, held in self.processes.values() if held is attempt]:
            self._drop_process(former)
        while len(self._forgotten_processes) > FORGOTTEN_PROCESSES_KEPT:
            del self._forgotten_processes[next(iter(self._forgotten_processes))]
        return False

    def _drop_process(self, process: Process) -> None:
        at = (process.host, process.key)
        self._processes_by_agent.get(process.agent, {}).pop(at, None)
        self.processes.pop(at, None)
        if process.is_alive:
            self._forgotten_processes[at] = None
        for sequence in process.streams.values():
            if sequence.group_state is not None:
                sequence.group_state.members.clear()
                # now: else all of an attempt's go at once, with the attempt
                sequence.group_state.reference_hashes.clear()
                sequence.group_state = None
        process.streams.clear()

    def is_urgent(self, agent: str) -> bool:
        """What it says next may decide. It speaks for a process that is stopped, for which py-spy
        may be to blame; for one of the first that wait, or the last that do not; for one of two
        that wait for each other; or for one whose calls part from the others'.
        """
        for process, attempt in self._processes_by_agent.get(agent, {}).values():
            if not attempt.suspects and not attempt.diverged_groups:
                continue
            waits = process.rank in attempt.suspects
            if waits and (
                process.state in STOPPED_STATES or len(attempt.suspects) <= MAX_URGENT_SUSPECTS
            ):
                return True
            if waits and any(
                s.peer is not None and attempt.waits_on(s.peer, process.rank)
                for s in process.unfinished_streams
            ):
                return True
            if not waits and 2 * len(attempt.suspects) > len(attempt.processes):
                return True
            if attempt.diverged_groups and any(
                s.group_state is not None and s.group_state.is_urgent
                for s in process.streams.values()
            ):
                return True
        return False

    def iter_mutual_waits(self, agent: str) -> Iterator[tuple[Process, Attempt]]:
        """Its processes that seem to wait for ranks that wait for them, where no stack tells yet
        whether they do.
        """
        for process, attempt in self._processes_by_agent.get(agent, {}).values():
            if (
                process.rank not in attempt.suspects
                or process.reported_at - process.last_active_at < IDLE_AFTER_S
            ):
                continue
            mutual = any(
                s.peer is not None and attempt.waits_on(s.peer, process.rank)
                for s in process.unfinished_streams
            )
            if mutual and not any(
                sample.taken_at >= process.last_advanced_at for sample in process.samples
            ):
                yield process, attempt

    def iter_divergences(self, agent: str) -> Iterator[tuple[Process, Attempt, CallStream, int]]:
        """Its processes in whose groups calls parted just now, one for each way in which they did,
        and the position where that was.
        """
        for process, attempt in self._processes_by_agent.get(agent, {}).values():
            for sequence in process.streams.values() if attempt.diverged_groups else ():
                team = sequence.group_state
                if team is not None and team.register_side(sequence, attempt.last_seen_at):
                    yield process, attempt, sequence, team.diverged_seq

    def has_finished(self, agent: str) -> bool:
        """All processes that a node agent spoke for have ended, or are forgotten."""
        return all(
            process.exit is not None
            for process, _ in self._processes_by_agent.get(agent, {}).values()
        )

    def forget_agent(self, agent: str) -> None:
        """Drops what tells a repeated heartbeat of an agent that has left."""
        self._last_heartbeats.pop(agent, None)
        self._processes_by_agent.pop(agent, None)
        self._clock_gaps.pop(agent, None)

    def _apply_process(
        self, heartbeat: heartbeat.Heartbeat, update: heartbeat.ProcessUpdate, now: float
    ) -> bool:
        held = self.processes.get((heartbeat.host, update.key))
        if (
            held is not None
            and update.identity is not None
            and held[0].identity.rank != update.identity.rank
        ):
            held[1].assign_rank(
                None, held[0].rank
            )  # it told its rank before init_process_group gave it another
            held = None
        if held is None:
            if update.identity is None:
                return False
            held = self._register_process(heartbeat.host, update.key, update.identity, now)
        process, attempt = held
        if update.identity is not None:
            process.identity = update.identity
            attempt.world_size = max(attempt.world_size, update.identity.world_size)
        if process.agent != heartbeat.agent:
            at = (heartbeat.host, update.key)
            self._processes_by_agent.get(process.agent, {}).pop(at, None)
            self._processes_by_agent.setdefault(heartbeat.agent, {})[at] = held
            process.agent = heartbeat.agent
        process.last_seen_at = process.reported_at = now
        if attempt.last_seen_at != now:
            attempt.mark_seen(now)
        if update.lifecycle != process.lifecycle:
            process.lifecycle = Lifecycle(min(max(update.lifecycle, 0), int(Lifecycle.EXITING)))
        process.step = update.step
        process.phase, process.phase_limit_s = update.phase, update.phase_limit_s
        process.phase_began_at = now - update.phase_s
        process.pulse_at = None if update.pulse_s is None else now - update.pulse_s
        if process.state != update.state:
            process.state, process.state_since = update.state, now
        process.last_active_at = now - update.idle_s
        process.cpu_s = update.cpu_s
        process.dropped, process.faults = update.dropped, update.faults
        if update.raised is not None and process.exception is None:
            process.exception, process.exception_at = update.raised, now - update.raised_s
        if update.ended is not None and process.exit is None:
            process.exit, process.exited_at = update.ended, now - update.ended_s
        complete = True
        for part in update.sequences:
            complete &= _apply_stream(attempt, process, part, now)
        if update.sequences:
            process.refresh_streams()
        if (update.checksums or update.nonfinite) and attempt.processes.get(
            process.rank
        ) is process:
            process.overflows = max(process.overflows, update.overflows)
            attempt.checks.apply_update(process, update, now)
        return complete

    def _apply_terse_update(self, host: str, update: heartbeat.ProcessUpdate, now: float) -> bool:
        """Some of a process's places, of one that gets on: it is further in others."""
        held = self.processes.get((host, update.key))
        if held is None:
            return False
        complete = True
        for part in update.sequences:
            complete &= _apply_stream(held[1], held[0], part, now)
        held[0].refresh_streams()
        return complete

    def _register_process(
        self, host: str, key: str, identity: heartbeat.ProcessIdentity, now: float
    ) -> tuple[Process, Attempt]:
        """Gives a new process its place: in the latest attempt, unless it began after that one was
        over or its rank is taken.
        """
        attempt = self.latest_attempt(identity.job)
        started_at = now - identity.started_s
        if attempt is not None:
            holder = attempt.processes.get(identity.rank)
            restarted = identity.restart > attempt.restart
            replaced = holder is not None and (holder.exit is not None or holder.host != host)
            # A job can fail faster than it is first told of: its ranks may all be dead and still be
            # one attempt.
            after = attempt.is_finished and started_at > max(
                p.exited_at or 0.0 for p in attempt.processes.values()
            )
            if after or restarted or replaced:
                attempt = None
        if attempt is None:
            number = self._assign_attempt_number(identity, started_at)
            attempt = Attempt(
                job=identity.job, number=number, restart=identity.restart, opened_at=now
            )
            self.attempts[(identity.job, number)] = attempt
        process = Process(
            key=key, host=host, identity=identity, started_at=started_at, last_seen_at=now
        )
        attempt.assign_rank(process, identity.rank)
        self.processes[(host, key)] = (process, attempt)
        return process, attempt

    def _assign_attempt_number(self, identity: heartbeat.ProcessIdentity, started_at: float) -> int:
        """Of a new attempt; or of the one that was known before the server was started again, where
        the process was part of it.
        """
        last = self.latest_attempt(identity.job)
        if last is not None:
            return max(identity.restart, last.number + 1)
        known = self.former_attempts.pop(identity.job, None)
        if known is None:
            return identity.restart
        goes_on = (
            not known.is_finished
            and identity.restart == known.restart
            and started_at <= known.last_seen_at
        )
        return known.number if goes_on else max(identity.restart, known.number + 1)

    def _apply_sample(self, host: str, sample: heartbeat.StackReply, now: float) -> None:
        if (held := self.processes.get((host, sample.key))) is None:
            return
        process = held[0]
        process.samples.append(
            StackSample(
                request=sample.request,
                source=sample.source,
                taken_at=now - sample.taken_s,
                native=sample.native,
                threads=sample.threads,
                error=sample.error,
            )
        )
        del process.samples[:-SAMPLES_KEPT_PER_PROCESS]

    def _apply_calls(self, host: str, reply: heartbeat.CallsReply) -> None:
        held = self.processes.get((host, reply.key))
        sequence = held[0].streams.get(reply.uid) if held else None
        if held is None or sequence is None:
            return
        _record_calls(held[1], held[0], sequence, reply.calls, requested=True)
        held[0].refresh_streams()
        sequence.fetched_to = max(sequence.fetched_to, max((c.seq for c in reply.calls), default=0))


def _apply_stream(
    attempt: Attempt, process: Process, update: heartbeat.StreamUpdate, now: float
) -> bool:
    sequence = process.streams.get(update.uid)
    known = sequence is not None
    if sequence is None:
        told = update.identity
        if told is None:
            return False
        sequence = CallStream(
            uid=update.uid,
            kind=told.kind,
            group=attempt.intern_group(told),
            peer=told.peer,
            tag=told.tag,
        )
        attempt.add_stream(process, sequence)
    before, finished = sequence.first_unfinished, sequence.completed or 0
    entered, completed, chain = update.entered, update.completed, update.chain
    entered_at = now - update.entered_s
    if (
        entered > sequence.entered
        and sequence.peer in attempt.suspects
        and sequence.last_growth[1] <= attempt.processes[sequence.peer].last_seen_at
    ):
        sequence.last_growth = sequence.entered, now
    sequence.entered, sequence.completed, sequence.chain, sequence.entered_at = (
        entered,
        completed,
        chain,
        entered_at,
    )
    if update.op:
        sequence.op = intern(update.op)
    if (entered if completed is None else completed + 1) > before:
        sequence.advanced_at = entered_at
    if (
        known and completed is not None and completed > finished
    ):  # else it may be long since: the server may have come up amid a hang
        sequence.last_completion_at = now
        _record_blocked_interval(process, sequence, before, now)
    sequence.pending_at = None if update.pending_s is None else now - update.pending_s
    if sequence.group_state is not None and (chain or update.checkpoints):
        pairs = update.checkpoints
        attempt.record_hashes(
            sequence,
            (*pairs, (entered, chain))
            if entered and chain and (not pairs or pairs[-1][0] != entered)
            else pairs,
        )
        if len(sequence.reported_hashes) > CHECKPOINTS_KEPT + CHECKPOINTS_SPARE:
            del sequence.reported_hashes[:-CHECKPOINTS_KEPT]
    if update.calls:
        _record_calls(attempt, process, sequence, update.calls, requested=sequence.fetched_to > 0)
    if update.shared and not sequence.concurrent_calls:
        sequence.concurrent_calls, sequence.concurrent_at = (
            update.shared,
            now - update.shared[-1].entered_s,
        )
        process.has_concurrent_calls = True
        team = sequence.group_state
        if (
            team is not None and team.members.get(process.rank) is sequence
        ):  # and not of a process whose rank another has
            attempt.concurrent_groups[team.key] = None
    return True


def _record_blocked_interval(process: Process, stream: CallStream, seq: int, now: float) -> None:
    """Some calls of ``sequence`` are over, of which ``call`` was the first: it stood in that one,
    as was told of it, or may have stood in the last since it was last heard. As soon as that was
    over, its thread ran.
    """
    if seq in stream.calls and stream.pending_at is not None:
        process.last_blocked = stream.pending_at, now
    elif stream.completed == stream.entered:
        began, ran = (
            max(process.previously_seen_at, stream.entered_at),
            min(process.last_active_at, now),
        )
        if ran - began > MIN_WAIT_S and ran > process.last_blocked[1]:
            process.last_blocked = began, ran


def _record_calls(
    attempt: Attempt, process: Process, stream: CallStream, calls: tuple[Call, ...], requested: bool
) -> None:
    """Notes calls. ``asked``: such were asked for, of this sequence, to be seen side by side with
    others'.
    """
    for call in calls:
        stream.calls[call.seq] = attempt.intern_call(call)
    attempt.track_calls(process, stream, calls)
    attempt.record_hashes(stream, tuple([(call.seq, call.chain) for call in calls if call.chain]))
    if not requested and len(stream.calls) > FINISHED_CALLS_KEPT:
        over = [
            seq for seq in stream.calls if seq < stream.first_unfinished
        ]  # of the others, the first is what everybody waits in
        for seq in sorted(over)[:-FINISHED_CALLS_KEPT]:
            del stream.calls[seq]
    if len(stream.calls) > CALLS_KEPT_PER_STREAM:
        for seq in sorted(stream.calls)[:-CALLS_KEPT_PER_STREAM]:
            del stream.calls[seq]
