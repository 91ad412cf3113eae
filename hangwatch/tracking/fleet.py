"""The state of all known jobs, updated by heartbeats that may arrive in any order.

Pure: the time is passed in, in seconds on the caller's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hangwatch.model.limits import STOPPED_STATES
from hangwatch.model.ranks import AttemptKey, Lifecycle
from hangwatch.protocol import heartbeat
from hangwatch.protocol.clocks import MAX_CLOCK_DRIFT

from .attempt import Attempt
from .call_stream import MAX_URGENT_SUSPECTS, CallStream
from .device_updates import apply_device_statuses
from .process import IDLE_AFTER_S, Process, StackSample
from .process_parts import Phase, ProcessActivity, RecorderHealth, ReportTimes
from .stream_updates import apply_stream_update, record_calls

SAMPLES_KEPT_PER_PROCESS = 4
FORMER_ATTEMPTS_KEPT = 1000  # one per job
FORGOTTEN_PROCESSES_KEPT = 1 << 17  # dropped processes that heartbeats may still mention


@dataclass(frozen=True, slots=True, kw_only=True)
class FormerAttempt:
    """The last attempt of a job without attempts in memory: the next one's number follows it."""

    number: int
    restart: int
    last_seen_at: float
    is_finished: bool


@dataclass(slots=True)
class Fleet:
    """Every job. State changes only by `apply_heartbeat` and by dropping old attempts."""

    attempts: dict[AttemptKey, Attempt] = field(default_factory=dict)
    # By (host, process key).
    processes: dict[tuple[str, str], tuple[Process, Attempt]] = field(default_factory=dict)
    former_attempts: dict[str, FormerAttempt] = field(default_factory=dict)  # by job
    # By agent: the number of its last heartbeat.
    _last_heartbeats: dict[str, int] = field(default_factory=dict)
    # By agent: the entries of `processes` that it reports.
    _processes_by_agent: dict[str, dict[tuple[str, str], tuple[Process, Attempt]]] = field(
        default_factory=dict
    )
    # By agent: the smallest difference seen between the time of receipt and the agent's clock, and
    # when that was updated.
    _clock_gaps: dict[str, tuple[float, float]] = field(default_factory=dict)
    # Processes of dropped attempts that were alive by their last report.
    _forgotten_processes: dict[tuple[str, str], None] = field(default_factory=dict)

    def latest_attempt(self, job: str) -> Attempt | None:
        candidates = [a for key, a in self.attempts.items() if key.job == job]
        return max(candidates, key=lambda a: a.number) if candidates else None

    def apply_heartbeat(self, heartbeat: heartbeat.Heartbeat, now: float) -> bool:
        """Applies a heartbeat received at ``now``. Returns False if a resync is needed, because it
        updates a process or a stream that is not known here.

        A repeated heartbeat, or one that arrives after a later one of the same agent, is ignored.
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
            if (entry := self.processes.get((heartbeat.host, key))) is not None:
                entry[0].finished_reporting = True
        if not heartbeat.brief:
            self._update_suspects(heartbeat.agent)
        return complete

    def _update_suspects(self, agent: str) -> None:
        for process, attempt in self._processes_by_agent.get(agent, {}).values():
            attempt.update_suspects(process)

    def _estimate_sent_at(self, heartbeat: heartbeat.Heartbeat, now: float) -> float:
        """When a heartbeat was sent, on the server's clock.

        The agent's fastest heartbeat so far is taken to have had no delay; any larger gap between
        the clocks, beyond their possible drift, is the delay of this one.
        """
        if heartbeat.sent_s is None:
            return now
        gap = now - heartbeat.sent_s
        smallest, updated_at = self._clock_gaps.get(heartbeat.agent, (gap, now))
        smallest = min(gap, smallest + MAX_CLOCK_DRIFT * (now - updated_at))
        self._clock_gaps[heartbeat.agent] = (smallest, now)
        return heartbeat.sent_s + smallest

    def _mark_seen(self, heartbeat: heartbeat.Heartbeat, now: float) -> None:
        """Updates the times at which the agent's live processes were last seen.

        A heartbeat holds only changes: what it does not mention is as reported before, or further
        along if the heartbeat is brief.
        """
        for process, attempt in self._processes_by_agent.get(heartbeat.agent, {}).values():
            if process.exit is None:
                reports = process.reports
                reports.previously_seen_at = max(reports.last_seen_at, reports.last_progress_at)
                if heartbeat.brief:
                    reports.last_progress_at = now
                else:
                    reports.last_seen_at = now
                if attempt.last_seen_at != now:
                    attempt.mark_seen(now)

    def mark_refused(self, agent: str, now: float) -> None:
        """Records that an agent is alive although its heartbeat was refused."""
        for process, _ in self._processes_by_agent.get(agent, {}).values():
            process.reports.last_refused_at = now

    def forget_attempt(self, attempt: Attempt) -> None:
        """Drops an attempt but not its processes, see `drop_processes`."""
        self.attempts.pop(attempt.key, None)
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
        """Drops up to ``max_processes`` of a forgotten attempt's current processes, since dropping
        100,000 in one call takes long. Returns False once none remain.

        The references between their objects are cleared: otherwise these cycles would stay until a
        full garbage collection.
        """
        for _ in range(min(max_processes, len(attempt.processes))):
            self._drop_process(attempt.processes.popitem()[1])
        if attempt.processes:
            return True
        former_processes = [p for p, owner in self.processes.values() if owner is attempt]
        for former in former_processes:
            self._drop_process(former)
        while len(self._forgotten_processes) > FORGOTTEN_PROCESSES_KEPT:
            del self._forgotten_processes[next(iter(self._forgotten_processes))]
        return False

    def _drop_process(self, process: Process) -> None:
        location = (process.host, process.key)
        self._processes_by_agent.get(process.agent, {}).pop(location, None)
        self.processes.pop(location, None)
        if process.is_alive:
            self._forgotten_processes[location] = None
        for stream in process.streams.values():
            if stream.group_state is not None:
                stream.group_state.members.clear()
                # Freed step by step here, rather than for all groups together with the attempt.
                stream.group_state.reference_hashes.clear()
                stream.group_state = None
        process.streams.clear()

    def is_urgent(self, agent: str) -> bool:
        """Whether the agent's next report may decide a diagnosis.

        True if it reports a stopped process (py-spy may have stopped it); one of the first suspects
        or of the last ranks that are not suspected; one of two ranks that wait for each other; or
        a member of a small group that diverged.
        """
        for process, attempt in self._processes_by_agent.get(agent, {}).values():
            if not attempt.suspects and not attempt.diverged_groups:
                continue
            is_suspect = process.rank in attempt.suspects
            if is_suspect and (
                process.activity.state in STOPPED_STATES
                or len(attempt.suspects) <= MAX_URGENT_SUSPECTS
            ):
                return True
            if is_suspect and _has_mutual_wait(process, attempt):
                return True
            if not is_suspect and 2 * len(attempt.suspects) > len(attempt.processes):
                return True
            if attempt.diverged_groups and any(
                s.group_state is not None and s.group_state.is_urgent
                for s in process.streams.values()
            ):
                return True
        return False

    def iter_mutual_waits(self, agent: str) -> Iterator[tuple[Process, Attempt]]:
        """The agent's processes that seem to wait for a rank that waits for them, and have no stack
        sample since their last call that could confirm it.
        """
        for process, attempt in self._processes_by_agent.get(agent, {}).values():
            if (
                process.rank not in attempt.suspects
                or process.reports.updated_at - process.activity.last_active_at < IDLE_AFTER_S
            ):
                continue
            if _has_mutual_wait(process, attempt) and not any(
                sample.taken_at >= process.last_advanced_at for sample in process.samples
            ):
                yield process, attempt

    def iter_divergences(self, agent: str) -> Iterator[tuple[Process, Attempt, CallStream, int]]:
        """The agent's streams whose calls should be requested after a recent divergence, one for
        each side of it, with the sequence number of the divergence.
        """
        for process, attempt in self._processes_by_agent.get(agent, {}).values():
            if not attempt.diverged_groups:
                continue
            for stream in process.streams.values():
                state = stream.group_state
                if state is not None and state.register_side(stream, attempt.last_seen_at):
                    yield process, attempt, stream, state.diverged_seq

    def has_finished(self, agent: str) -> bool:
        """Whether all processes that a node agent reported have exited or are forgotten."""
        return all(
            process.exit is not None
            for process, _ in self._processes_by_agent.get(agent, {}).values()
        )

    def forget_agent(self, agent: str) -> None:
        """Drops the per-agent state (heartbeat number, clock gap) of an agent that has left."""
        self._last_heartbeats.pop(agent, None)
        self._processes_by_agent.pop(agent, None)
        self._clock_gaps.pop(agent, None)

    def _apply_process(
        self, heartbeat: heartbeat.Heartbeat, update: heartbeat.ProcessUpdate, now: float
    ) -> bool:
        location = (heartbeat.host, update.key)
        entry = self.processes.get(location)
        if (
            entry is not None
            and update.identity is not None
            and entry[0].identity.rank != update.identity.rank
        ):
            # It reported a rank before init_process_group assigned it another one.
            entry[1].assign_rank(None, entry[0].rank)
            entry = None
        if entry is None:
            if update.identity is None:
                return False
            entry = self._register_process(heartbeat.host, update.key, update.identity, now)
        process, attempt = entry
        if update.identity is not None:
            process.identity = update.identity
            attempt.world_size = max(attempt.world_size, update.identity.world_size)
        if process.agent != heartbeat.agent:
            self._processes_by_agent.get(process.agent, {}).pop(location, None)
            self._processes_by_agent.setdefault(heartbeat.agent, {})[location] = entry
            process.agent = heartbeat.agent
        process.reports.last_seen_at = process.reports.updated_at = now
        if attempt.last_seen_at != now:
            attempt.mark_seen(now)
        if update.lifecycle != process.lifecycle:
            process.lifecycle = Lifecycle(min(max(update.lifecycle, 0), int(Lifecycle.EXITING)))
        _apply_progress(process, update, now)
        _apply_activity(process.activity, update, now)
        health = process.recorder
        if update.dropped != health.dropped or update.faults != health.faults:
            process.recorder = RecorderHealth(update.dropped, update.faults)
        process.device_variable = update.device_variable
        if update.raised is not None and process.exception is None:
            process.exception, process.exception_at = update.raised, now - update.raised_s
        if update.ended is not None and process.exit is None:
            process.exit, process.exited_at = update.ended, now - update.ended_s
        complete = True
        for stream_update in update.sequences:
            complete &= apply_stream_update(attempt, process, stream_update, now)
        if update.sequences:
            process.refresh_streams()
        apply_device_statuses(process, update.device, now)
        holds_rank = attempt.processes.get(process.rank) is process
        if (update.checksums or update.nonfinite) and holds_rank:
            process.overflows = max(process.overflows, update.overflows)
            attempt.checks.apply_update(process, update, now)
        return complete

    def _apply_terse_update(self, host: str, update: heartbeat.ProcessUpdate, now: float) -> bool:
        """Applies the stream updates of a brief heartbeat. The process makes progress: in streams
        that are not mentioned it may be further than is known.
        """
        entry = self.processes.get((host, update.key))
        if entry is None:
            return False
        process, attempt = entry
        complete = True
        for stream_update in update.sequences:
            complete &= apply_stream_update(attempt, process, stream_update, now)
        process.refresh_streams()
        return complete

    def _register_process(
        self, host: str, key: str, identity: heartbeat.ProcessIdentity, now: float
    ) -> tuple[Process, Attempt]:
        """Adds a new process to the latest attempt of its job, or to a new attempt if it started
        after the latest one finished, was restarted, or its rank is taken.
        """
        attempt = self.latest_attempt(identity.job)
        started_at = now - identity.started_s
        if attempt is not None:
            holder = attempt.processes.get(identity.rank)
            restarted = identity.restart > attempt.restart
            replaced = holder is not None and (holder.exit is not None or holder.host != host)
            # A job can fail before all of its ranks are first reported: a process that started
            # before the last known exit belongs to the same attempt.
            started_later = attempt.is_finished and started_at > max(
                p.exited_at or 0.0 for p in attempt.processes.values()
            )
            if started_later or restarted or replaced:
                attempt = None
        if attempt is None:
            number = self._assign_attempt_number(identity, started_at)
            attempt = Attempt(
                job=identity.job, number=number, restart=identity.restart, opened_at=now
            )
            self.attempts[attempt.key] = attempt
        process = Process(
            key=key,
            host=host,
            identity=identity,
            started_at=started_at,
            reports=ReportTimes(last_seen_at=now),
        )
        attempt.assign_rank(process, identity.rank)
        self.processes[(host, key)] = (process, attempt)
        return process, attempt

    def _assign_attempt_number(self, identity: heartbeat.ProcessIdentity, started_at: float) -> int:
        """The number for a new `Attempt` object: that of the attempt known before the server was
        restarted, if the process belongs to it; else the next free one.
        """
        last = self.latest_attempt(identity.job)
        if last is not None:
            return max(identity.restart, last.number + 1)
        known = self.former_attempts.pop(identity.job, None)
        if known is None:
            return identity.restart
        continues = (
            not known.is_finished
            and identity.restart == known.restart
            and started_at <= known.last_seen_at
        )
        return known.number if continues else max(identity.restart, known.number + 1)

    def _apply_sample(self, host: str, sample: heartbeat.StackReply, now: float) -> None:
        if (entry := self.processes.get((host, sample.key))) is None:
            return
        process, _ = entry
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
        if (entry := self.processes.get((host, reply.key))) is None:
            return
        process, attempt = entry
        stream = process.streams.get(reply.uid)
        if stream is None:
            return
        record_calls(attempt, process, stream, reply.calls, requested=True)
        process.refresh_streams()
        last_seq = max((call.seq for call in reply.calls), default=0)
        stream.fetched_to = max(stream.fetched_to, last_seq)


def _apply_progress(process: Process, update: heartbeat.ProcessUpdate, now: float) -> None:
    process.step = update.step
    if update.phase is not None:
        process.phase = Phase(
            name=update.phase, began_at=now - update.phase_s, limit_s=update.phase_limit_s
        )
    elif process.phase is not None:
        process.phase = None


def _apply_activity(activity: ProcessActivity, update: heartbeat.ProcessUpdate, now: float) -> None:
    activity.pulse_at = None if update.pulse_s is None else now - update.pulse_s
    if activity.state != update.state:
        activity.state, activity.state_since = update.state, now
    activity.last_active_at = now - update.idle_s
    activity.cpu_s = update.cpu_s


def _has_mutual_wait(process: Process, attempt: Attempt) -> bool:
    """Whether the process has an unfinished call with a suspected peer that waits for it."""
    return any(
        stream.peer is not None and attempt.waits_on(stream.peer, process.rank)
        for stream in process.open_calls.unfinished_streams
    )
