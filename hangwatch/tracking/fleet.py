"""What heartbeats change: every job that is known, in whatever order they come. Pure: the time is passed in.

All times are seconds on one monotonic clock, the caller's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from sys import intern

from hangwatch.model.calls import Call
from hangwatch.model.limits import STANDING, STOPPED
from hangwatch.model.ranks import Lifecycle
from hangwatch.protocol import heartbeat
from hangwatch.protocol.clocks import DRIFT

from .attempt import Attempt
from .call_stream import CHECKPOINTS_KEPT, CHECKPOINTS_SPARE, FIRST_SUSPECTS, Sequence
from .process import IDLE, Process, Sample

CALLS_KEPT = 256  # of a sequence
STANDING_KEPT = 8  # that are over, where none were asked for: a job of which each call takes a while tells all of them
SAMPLES_KEPT = 4
REMEMBERED_KEPT = 1000  # jobs
FORGOTTEN_KEPT = 1 << 17  # processes that may still be spoken of


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """The last attempt of a job that is not in memory: numbers go on from it."""

    number: int
    restart: int
    heard_at: float
    over: bool


@dataclass(slots=True)
class Fleet:
    """Every job. `apply` is the only way in."""

    attempts: dict[tuple[str, int], Attempt] = field(default_factory=dict)
    processes: dict[tuple[str, str], tuple[Process, Attempt]] = field(default_factory=dict)  # by (host, key)
    remembered: dict[str, Remembered] = field(default_factory=dict)  # by job
    _numbers: dict[str, int] = field(default_factory=dict)  # the last heartbeat of each agent
    # The processes that each agent speaks for, as `processes` has them.
    _told_by: dict[str, dict[tuple[str, str], tuple[Process, Attempt]]] = field(default_factory=dict)
    _apart: dict[str, tuple[float, float]] = field(default_factory=dict)  # by agent: its clock from this one, at the least, and when
    _forgotten: dict[tuple[str, str], None] = field(default_factory=dict)  # alive by their last word, of attempts that were dropped

    def latest(self, job: str) -> Attempt | None:
        mine = [a for (name, _), a in self.attempts.items() if name == job]
        return max(mine, key=lambda a: a.number) if mine else None

    def apply(self, beat: heartbeat.Heartbeat, now: float) -> bool:
        """Takes a heartbeat in. False asks for a resync: it spoke of a process or a sequence that is not known here.

        A heartbeat that comes again, or after a later one of the same agent, changes nothing but is no error.
        """
        if beat.number <= self._numbers.get(beat.agent, 0):
            return True
        self._numbers[beat.agent] = beat.number
        now = self._dated(beat, now)
        self._heard(beat, now)
        complete = True
        for update in beat.processes:
            if (beat.host, update.key) not in self._forgotten:
                complete &= self._process(beat, update, now) if not beat.brief else self._places(beat.host, update, now)
        for sample in beat.samples:
            self._sample(beat.host, sample, now)
        for reply in beat.calls:
            self._calls(beat.host, reply)
        for key in beat.gone:
            if (held := self.processes.get((beat.host, key))) is not None:
                held[0].gone = True
        if not beat.brief:
            self._judge(beat.agent)
        return complete

    def _judge(self, agent: str) -> None:
        for process, attempt in self._told_by.get(agent, {}).values():
            attempt.judge(process)

    def _dated(self, beat: heartbeat.Heartbeat, now: float) -> float:
        """When a heartbeat was sent: it took longer than the agent's quickest by so much, give or take the clocks' drift."""
        if beat.sent_s is None:
            return now
        apart = now - beat.sent_s
        least, at = self._apart.get(beat.agent, (apart, now))
        least = min(apart, least + DRIFT * (now - at))
        self._apart[beat.agent] = (least, now)
        return beat.sent_s + least

    def _heard(self, beat: heartbeat.Heartbeat, now: float) -> None:
        """The node agent is alive: all that it said before still holds, or its processes have got further."""
        for process, attempt in self._told_by.get(beat.agent, {}).values():
            if process.ended is None:
                process.heard_before = max(process.heard_at, process.getting_on_at)
                if beat.brief:
                    process.getting_on_at = now
                else:
                    process.heard_at = now
                if attempt.heard_at != now:
                    attempt.heard(now)

    def spoke(self, agent: str, now: float) -> None:
        """A node agent is there, though what it says could not be taken in."""
        for process, _ in self._told_by.get(agent, {}).values():
            process.refused_at = now

    def forget(self, attempt: Attempt) -> None:
        """Drops an attempt; its processes are dropped by `dismantle`."""
        self.attempts.pop((attempt.job, attempt.number), None)
        if self.latest(attempt.job) is None:
            self.remembered[attempt.job] = Remembered(
                number=attempt.number, restart=attempt.restart, heard_at=attempt.heard_at, over=attempt.over
            )
            while len(self.remembered) > REMEMBERED_KEPT:
                del self.remembered[next(iter(self.remembered))]

    def dismantle(self, attempt: Attempt, most: int) -> bool:
        """Drops some of a forgotten attempt's processes: for 100,000 at once it takes long. False once there are none left.

        They are taken apart: what refers to one another would stay until the garbage collector looks at all that there is.
        """
        for _ in range(min(most, len(attempt.ranks))):
            self._drop(attempt.ranks.popitem()[1])
        if attempt.ranks:
            return True
        for former in [process for process, held in self.processes.values() if held is attempt]:
            self._drop(former)
        while len(self._forgotten) > FORGOTTEN_KEPT:
            del self._forgotten[next(iter(self._forgotten))]
        return False

    def _drop(self, process: Process) -> None:
        at = (process.host, process.key)
        self._told_by.get(process.agent, {}).pop(at, None)
        self.processes.pop(at, None)
        if process.alive:
            self._forgotten[at] = None
        for sequence in process.sequences.values():
            if sequence.team is not None:
                sequence.team.members.clear()
                sequence.team.agreed.clear()  # now: else all of an attempt's go at once, with the attempt
                sequence.team = None
        process.sequences.clear()

    def pressing(self, agent: str) -> bool:
        """What it says next may decide. It speaks for a process that is stopped, for which py-spy may be to blame; for one of the first
        that wait, or the last that do not; for one of two that wait for each other; or for one whose calls part from the others'.
        """
        for process, attempt in self._told_by.get(agent, {}).values():
            if not attempt.suspects and not attempt.doubted:
                continue
            waits = process.rank in attempt.suspects
            if waits and (process.state in STOPPED or len(attempt.suspects) <= FIRST_SUSPECTS):
                return True
            if waits and any(s.peer is not None and attempt.waits_on(s.peer, process.rank) for s in process.unfinished):
                return True
            if not waits and 2 * len(attempt.suspects) > len(attempt.ranks):
                return True
            if attempt.doubted and any(s.team is not None and s.team.pressing for s in process.sequences.values()):
                return True
        return False

    def facing(self, agent: str) -> Iterator[tuple[Process, Attempt]]:
        """Its processes that seem to wait for ranks that wait for them, where no stack tells yet whether they do."""
        for process, attempt in self._told_by.get(agent, {}).values():
            if process.rank not in attempt.suspects or process.told_at - process.idle_at < IDLE:
                continue
            mutual = any(s.peer is not None and attempt.waits_on(s.peer, process.rank) for s in process.unfinished)
            if mutual and not any(sample.taken_at >= process.got_on_at for sample in process.samples):
                yield process, attempt

    def parting(self, agent: str) -> Iterator[tuple[Process, Attempt, Sequence, int]]:
        """Its processes in whose groups calls parted just now, one for each way in which they did, and the position where that was."""
        for process, attempt in self._told_by.get(agent, {}).values():
            for sequence in process.sequences.values() if attempt.doubted else ():
                team = sequence.team
                if team is not None and team.new_side(sequence, attempt.heard_at):
                    yield process, attempt, sequence, team.parted_at

    def done(self, agent: str) -> bool:
        """All processes that a node agent spoke for have ended, or are forgotten."""
        return all(process.ended is not None for process, _ in self._told_by.get(agent, {}).values())

    def forget_agent(self, agent: str) -> None:
        """Drops what tells a repeated heartbeat of an agent that has left."""
        self._numbers.pop(agent, None)
        self._told_by.pop(agent, None)
        self._apart.pop(agent, None)

    def _process(self, beat: heartbeat.Heartbeat, update: heartbeat.ProcessUpdate, now: float) -> bool:
        held = self.processes.get((beat.host, update.key))
        if held is not None and update.identity is not None and held[0].identity.rank != update.identity.rank:
            held[1].hold(None, held[0].rank)  # it told its rank before init_process_group gave it another
            held = None
        if held is None:
            if update.identity is None:
                return False
            held = self._register(beat.host, update.key, update.identity, now)
        process, attempt = held
        if update.identity is not None:
            process.identity = update.identity
            attempt.world_size = max(attempt.world_size, update.identity.world_size)
        if process.agent != beat.agent:
            at = (beat.host, update.key)
            self._told_by.get(process.agent, {}).pop(at, None)
            self._told_by.setdefault(beat.agent, {})[at] = held
            process.agent = beat.agent
        process.heard_at = process.told_at = now
        if attempt.heard_at != now:
            attempt.heard(now)
        if update.lifecycle != process.lifecycle:
            process.lifecycle = Lifecycle(min(max(update.lifecycle, 0), int(Lifecycle.EXITING)))
        process.step = update.step
        process.phase, process.phase_limit = update.phase, update.phase_limit_s
        process.phase_at = now - update.phase_s
        process.pulse_at = None if update.pulse_s is None else now - update.pulse_s
        if process.state != update.state:
            process.state, process.state_at = update.state, now
        process.idle_at = now - update.idle_s
        process.cpu_s = update.cpu_s
        process.dropped, process.faults = update.dropped, update.faults
        if update.raised is not None and process.raised is None:
            process.raised, process.raised_at = update.raised, now - update.raised_s
        if update.ended is not None and process.ended is None:
            process.ended, process.ended_at = update.ended, now - update.ended_s
        complete = True
        for part in update.sequences:
            complete &= _sequence(attempt, process, part, now)
        if update.sequences:
            process.settle()
        if (update.checksums or update.nonfinite) and attempt.ranks.get(process.rank) is process:
            process.overflows = max(process.overflows, update.overflows)
            attempt.checks.take(process, update, now)
        return complete

    def _places(self, host: str, update: heartbeat.ProcessUpdate, now: float) -> bool:
        """Some of a process's places, of one that gets on: it is further in others."""
        held = self.processes.get((host, update.key))
        if held is None:
            return False
        complete = True
        for part in update.sequences:
            complete &= _sequence(held[1], held[0], part, now)
        held[0].settle()
        return complete

    def _register(self, host: str, key: str, identity: heartbeat.Identity, now: float) -> tuple[Process, Attempt]:
        """Gives a new process its place: in the latest attempt, unless it began after that one was over or its rank is taken."""
        attempt = self.latest(identity.job)
        started_at = now - identity.started_s
        if attempt is not None:
            holder = attempt.ranks.get(identity.rank)
            restarted = identity.restart > attempt.restart
            replaced = holder is not None and (holder.ended is not None or holder.host != host)
            # A job can fail faster than it is first told of: its ranks may all be dead and still be one attempt.
            after = attempt.over and started_at > max(p.ended_at or 0.0 for p in attempt.ranks.values())
            if after or restarted or replaced:
                attempt = None
        if attempt is None:
            number = self._number(identity, started_at)
            attempt = Attempt(job=identity.job, number=number, restart=identity.restart, opened_at=now)
            self.attempts[(identity.job, number)] = attempt
        process = Process(key=key, host=host, identity=identity, started_at=started_at, heard_at=now)
        attempt.hold(process, identity.rank)
        self.processes[(host, key)] = (process, attempt)
        return process, attempt

    def _number(self, identity: heartbeat.Identity, started_at: float) -> int:
        """Of a new attempt; or of the one that was known before the server was started again, where the process was part of it."""
        last = self.latest(identity.job)
        if last is not None:
            return max(identity.restart, last.number + 1)
        known = self.remembered.pop(identity.job, None)
        if known is None:
            return identity.restart
        goes_on = not known.over and identity.restart == known.restart and started_at <= known.heard_at
        return known.number if goes_on else max(identity.restart, known.number + 1)

    def _sample(self, host: str, sample: heartbeat.Sample, now: float) -> None:
        if (held := self.processes.get((host, sample.key))) is None:
            return
        process = held[0]
        process.samples.append(
            Sample(
                request=sample.request,
                source=sample.source,
                taken_at=now - sample.taken_s,
                native=sample.native,
                threads=sample.threads,
                error=sample.error,
            )
        )
        del process.samples[:-SAMPLES_KEPT]

    def _calls(self, host: str, reply: heartbeat.CallsReply) -> None:
        held = self.processes.get((host, reply.key))
        sequence = held[0].sequences.get(reply.uid) if held else None
        if held is None or sequence is None:
            return
        _learn(held[1], held[0], sequence, reply.calls, asked=True)
        held[0].settle()
        sequence.fetched_to = max(sequence.fetched_to, max((c.seq for c in reply.calls), default=0))


def _sequence(attempt: Attempt, process: Process, update: heartbeat.SequenceUpdate, now: float) -> bool:
    sequence = process.sequences.get(update.uid)
    known = sequence is not None
    if sequence is None:
        told = update.identity
        if told is None:
            return False
        sequence = Sequence(uid=update.uid, kind=told.kind, group=attempt.group(told), peer=told.peer, tag=told.tag)
        attempt.add(process, sequence)
    before, finished = sequence.first_unfinished, sequence.completed or 0
    entered, completed, chain = update.entered, update.completed, update.chain
    entered_at = now - update.entered_s
    if entered > sequence.entered and sequence.peer in attempt.suspects and sequence.grew[1] <= attempt.ranks[sequence.peer].heard_at:
        sequence.grew = sequence.entered, now
    sequence.entered, sequence.completed, sequence.chain, sequence.entered_at = entered, completed, chain, entered_at
    if update.op:
        sequence.op = intern(update.op)
    if (entered if completed is None else completed + 1) > before:
        sequence.moved_at = entered_at
    if known and completed is not None and completed > finished:  # else it may be long since: the server may have come up amid a hang
        sequence.finished_at = now
        _held(process, sequence, before, now)
    sequence.pending_at = None if update.pending_s is None else now - update.pending_s
    if sequence.team is not None and (chain or update.checkpoints):
        pairs = update.checkpoints
        attempt.tell(sequence, (*pairs, (entered, chain)) if entered and chain and (not pairs or pairs[-1][0] != entered) else pairs)
        if len(sequence.told) > CHECKPOINTS_KEPT + CHECKPOINTS_SPARE:
            del sequence.told[:-CHECKPOINTS_KEPT]
    if update.calls:
        _learn(attempt, process, sequence, update.calls, asked=sequence.fetched_to > 0)
    if update.shared and not sequence.shared:
        sequence.shared, sequence.shared_at = update.shared, now - update.shared[-1].entered_s
        process.shares = True
        team = sequence.team
        if team is not None and team.members.get(process.rank) is sequence:  # and not of a process whose rank another has
            attempt.concurrent[team.key] = None
    return True


def _held(process: Process, sequence: Sequence, call: int, now: float) -> None:
    """Some calls of ``sequence`` are over, of which ``call`` was the first: it stood in that one, as was told of it, or may have stood
    in the last since it was last heard. As soon as that was over, its thread ran.
    """
    if call in sequence.calls and sequence.pending_at is not None:
        process.held = sequence.pending_at, now
    elif sequence.completed == sequence.entered:
        began, ran = max(process.heard_before, sequence.entered_at), min(process.idle_at, now)
        if ran - began > STANDING and ran > process.held[1]:
            process.held = began, ran


def _learn(attempt: Attempt, process: Process, sequence: Sequence, calls: tuple[Call, ...], asked: bool) -> None:
    """Notes calls. ``asked``: such were asked for, of this sequence, to be seen side by side with others'."""
    for call in calls:
        sequence.calls[call.seq] = attempt.shared(call)
    attempt.learn(process, sequence, calls)
    attempt.tell(sequence, tuple([(call.seq, call.chain) for call in calls if call.chain]))
    if not asked and len(sequence.calls) > STANDING_KEPT:
        over = [seq for seq in sequence.calls if seq < sequence.first_unfinished]  # of the others, the first is what everybody waits in
        for seq in sorted(over)[:-STANDING_KEPT]:
            del sequence.calls[seq]
    if len(sequence.calls) > CALLS_KEPT:
        for seq in sorted(sequence.calls)[:-CALLS_KEPT]:
            del sequence.calls[seq]
