"""The state of all known jobs and node agents, updated by heartbeats that may arrive in any order.

The time is passed in, in seconds on the caller's monotonic clock. A new process joins its job's latest
attempt, a new attempt, or another world that runs beside it under the same name.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from hangwatch.model.groups import is_group_address
from hangwatch.model.ranks import AttemptKey, Lifecycle
from hangwatch.protocol.heartbeat import (
    MAX_CLOCK_DRIFT,
    AgentCost,
    Heartbeat,
    ProcessIdentity,
    ProcessUpdate,
    get_family,
)

from .attempt import Attempt, HostHardware, is_known_address
from .call_stream import CallWindow
from .foreign_groups import ForeignGroups, disconnect_channel
from .process import KernelSample, Process, ReportTimes, StackSample
from .tenants import change_count, get_tenant, take_turns
from .updates import apply_process_update, apply_terse_update, record_calls

FORMER_ATTEMPTS_KEPT = 1000  # one per job
FORGOTTEN_PROCESSES_KEPT = 1 << 17  # dropped processes that heartbeats may still mention
# An attempt whose node agents are silent for longer may have been replaced by another one.
SUCCEEDED_SILENT_S = 3.0
# The worlds of one job that run at the same time: more of them count as attempts of the first one.
MAX_WORLDS = 32
# Another node agent may report a process after its own has sent no heartbeat for this long: node
# agents of large jobs report every 20 to 30 seconds.
OWNER_SILENT_S = 45.0
SILENT_AFTER_S = 60.0  # an agent without a heartbeat for so long no longer counts towards the load
# Node agents give a heartbeat up much earlier, so a larger gap is a jump of the agent's clock.
MAX_DELAY_S = 120.0

ProcessLocation = tuple[str, str]  # (host, process key)
ProcessKey = tuple[str, str, str]  # (the job that it names, or its tenant, host, process key)


@dataclass(slots=True)
class ReportingAgent:
    """A node agent with the processes that it reports."""

    last_seen_at: float = 0.0
    last_number: int = 0  # the number of its last heartbeat
    is_awaited: bool = False  # the server has requested that its next heartbeat is urgent
    cost: AgentCost | None = None  # the last one reported
    families: tuple[str, ...] = ()  # the families of its jobs; without one, that of its tenant
    processes: dict[ProcessLocation, Process] = field(default_factory=dict)
    # The smallest difference seen between the time of receipt and the agent's clock, and when.
    _smallest_gap: tuple[float, float] | None = None

    def estimate_sent_at(self, beat: Heartbeat, received_at: float) -> float:
        """When a heartbeat was sent, on the server's clock.

        The agent's fastest heartbeat so far is taken to have had no delay; any larger gap between
        the clocks, beyond their possible drift, is the delay of this one. After a jump of the agent's
        clock, as when its machine was suspended, this starts again.
        """
        if beat.sent_s is None:
            return received_at
        gap = received_at - beat.sent_s
        smallest, updated_at = self._smallest_gap or (gap, received_at)
        if abs(gap - smallest) > MAX_DELAY_S:
            smallest = gap
        smallest = min(gap, smallest + MAX_CLOCK_DRIFT * (received_at - updated_at))
        self._smallest_gap = smallest, received_at
        return beat.sent_s + smallest


class AgentRegistry(OrderedDict[str, ReportingAgent]):
    """Node agents by the server's name of each (`tenants`), ordered by their last heartbeat."""

    cpu_s: float = 0.0  # the CPU time of all agents, also of those that have left

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()  # the number of agents of each family of jobs
        self._silent_counts: Counter[str] = Counter()
        self._reporting_counts: Counter[str] | None = None

    @property
    def reporting_counts(self) -> Counter[str]:
        """The number of agents of each family that are not silent. Another object after a change."""
        if self._reporting_counts is None:
            self._reporting_counts = self.counts - self._silent_counts
        return self._reporting_counts

    def _count_agent(self, families: tuple[str, ...], change: int) -> None:
        self._reporting_counts = None
        for family in families:
            change_count(self.counts, family, change)

    def get_families(self, agent_id: str) -> tuple[str, ...]:
        """The families of an agent's jobs; that of its tenant if it is unknown."""
        agent = self.get(agent_id)
        if agent is not None:
            return agent.families
        return (get_family(get_tenant(agent_id)),)

    def join_family(self, agent: ReportingAgent, family: str) -> None:
        """Records that an agent is about to report a process of a job in the family."""
        if family not in agent.families:
            self._count_agent(agent.families, -1)
            agent.families = (*agent.families, family) if agent.processes else (family,)
            self._count_agent(agent.families, 1)

    def record_heartbeat(self, beat: Heartbeat, now: float) -> ReportingAgent:
        """Records that an agent reported, and returns it."""
        agent = self.get(beat.agent)
        if agent is None:
            agent = ReportingAgent(families=self.get_families(beat.agent))
            self[beat.agent] = agent
            self._count_agent(agent.families, 1)
        else:
            self.move_to_end(beat.agent)
        agent.last_seen_at = now
        if beat.cost is not None:
            former_s = agent.cost.cpu_s if agent.cost is not None else 0.0
            self.cpu_s += max(0.0, beat.cost.cpu_s - former_s)
            agent.cost = beat.cost
        return agent

    def update_silent(self, now: float) -> list[tuple[str, float]]:
        """Counts the silent agents. Returns their ids and for how many seconds they are silent."""
        silent = []
        self._silent_counts.clear()
        self._reporting_counts = None
        for agent_id, agent in self.items():
            silent_s = now - agent.last_seen_at
            if silent_s <= SILENT_AFTER_S:
                break  # all further agents reported later
            silent.append((agent_id, silent_s))
            self._silent_counts.update(agent.families)
        return silent

    def forget_silent(self, agent_id: str) -> None:
        """Drops an agent that `update_silent` returned, but not its processes."""
        families = self.pop(agent_id).families
        self._silent_counts.subtract(families)
        self._count_agent(families, -1)


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

    # The attempts of a job are in the order of their numbers.
    attempts: dict[AttemptKey, Attempt] = field(default_factory=dict)
    # Current and former processes. Only identities are looked up here: see `find_process`.
    processes: dict[ProcessKey, Process] = field(default_factory=dict)
    process_counts: Counter[str] = field(default_factory=Counter)  # the key is the family of jobs
    former_attempts: dict[str, FormerAttempt] = field(default_factory=dict)  # the key is the job
    foreign_groups: ForeignGroups = field(default_factory=ForeignGroups)
    agents: AgentRegistry = field(default_factory=AgentRegistry)
    # The family that may add no processes and groups, since it takes the most of scarce memory
    restricted_family: str | None = None
    foreign_reports: int = 0  # updates of processes that another active node agent reports
    # The attempts of each family's jobs by number.
    _families: dict[str, dict[str, dict[int, Attempt]]] = field(default_factory=dict)
    # Processes of dropped attempts that were alive by their last report, by tenant, host and key. The
    # dict is an ordered set.
    _forgotten_processes: dict[ProcessKey, None] = field(default_factory=dict)

    def list_attempts(self, job: str) -> Collection[Attempt]:
        """The attempts of a job in the order of their numbers."""
        return self._families.get(get_family(job), {}).get(job, {}).values()

    def iter_related(self, family: str) -> Iterator[Attempt]:
        """The attempts of all jobs of a family."""
        for attempts in self._families.get(family, {}).values():
            yield from attempts.values()

    def latest_attempt(self, job: str) -> Attempt | None:
        attempts = self._families.get(get_family(job), {}).get(job)
        return next(reversed(attempts.values())) if attempts else None

    def is_current(self, attempt: Attempt, now: float) -> bool:
        """Whether it is its job's latest attempt, or ranks of it still run and are reported, and the
        later attempts are other people's: a launch under the same name does not end its ranks unless
        one of their own node agents reports it.
        """
        others = self.list_attempts(attempt.job)
        later = [other for other in others if other.number > attempt.number]
        if not later:
            return True
        is_silent = now - attempt.last_seen_at > SUCCEEDED_SILENT_S
        if is_silent or attempt.is_finished:
            return False
        return all(attempt.owners.isdisjoint(other.owners) for other in later)

    def list_jobs(self, agent: str) -> set[str]:
        """The jobs whose processes the agent reports."""
        return {process.attempt.job for process in self.list_processes(agent)}

    def count_members(self, family: str | None = None) -> int:
        """The members of all different worlds and process groups in memory, or of a family's."""
        attempts = self.attempts.values() if family is None else self.iter_related(family)
        return sum(attempt.count_members() for attempt in attempts)

    def apply_heartbeat(self, beat: Heartbeat, now: float) -> bool:
        """Applies a heartbeat received at ``now``. Returns False if a resync is needed, because it
        updates a process or a stream that is not known here.

        A repeated heartbeat, or one that arrives after a later one of the same agent, is ignored.
        """
        agent = self.agents.record_heartbeat(beat, now)
        if beat.number <= agent.last_number:
            return True
        agent.last_number = beat.number
        now = agent.estimate_sent_at(beat, now)
        # A heartbeat holds only changes: the processes that it does not mention are as reported
        # before, or further along if it is brief.
        for process in agent.processes.values():
            if process.exit is None:
                attempt, reports = process.attempt, process.reports
                reports.previously_seen_at = max(reports.last_seen_at, reports.last_progress_at)
                if beat.brief:
                    reports.last_progress_at = now
                    attempt.record_call_time(now, reports.previously_seen_at)
                else:
                    reports.last_seen_at = now
                attempt.mark_seen(now)
        all_known = True
        tenant = get_tenant(beat.agent)
        for update in beat.processes:
            if (tenant, beat.host, update.key) in self._forgotten_processes:
                continue
            if beat.brief:
                known = agent.processes.get((beat.host, update.key))
                all_known &= known is not None and apply_terse_update(known, update, now)
            else:
                all_known &= self._apply_full_update(agent, beat, update, now)
        self._apply_replies(agent, beat, now)
        for key in beat.gone:
            gone = agent.processes.get((beat.host, key))
            if gone is not None:
                gone.finished_reporting = True
        self.foreign_groups.connect_members()
        if not beat.brief:
            for process in agent.processes.values():
                process.attempt.update_suspects(process)
        return all_known

    def _apply_replies(self, agent: ReportingAgent, beat: Heartbeat, now: float) -> None:
        """Applies the evidence that was requested."""
        processes, host = agent.processes, beat.host
        for sample in beat.samples:
            process = processes.get((host, sample.key))
            if process is not None:
                process.add_sample(StackSample.from_reply(sample, now))
        for kernels in beat.kernels:
            process = processes.get((host, kernels.key))
            if process is not None:
                process.kernels = KernelSample.from_reply(kernels, now)
                process.attempt.kernels_at = now
        for reply in beat.calls:
            process = processes.get((host, reply.key))
            stream = process.streams.get(reply.uid) if process is not None else None
            if process is not None and stream is not None:
                stream.add_answer(CallWindow(reply.from_seq, reply.to_seq, max(1, reply.step)))
                record_calls(process, stream, reply.calls)
                process.refresh_streams()
        for hardware in beat.hardware:
            process = processes.get((host, hardware.key))
            if process is not None:
                process.attempt.hardware[host] = HostHardware.from_reply(hardware, now)

    def find_process(self, agent: str, host: str, update: ProcessUpdate) -> Process | None:
        """The process that an update of a node agent is about: one that this agent reports, or that
        another one reports for the job that the update names.
        """
        known = self.agents.get(agent)
        process = None if known is None else known.processes.get((host, update.key))
        if process is None and update.identity is not None:
            process = self.processes.get((update.identity.job, host, update.key))
        return process

    def list_processes(self, agent: str) -> Iterable[Process]:
        """The processes that a node agent reports."""
        known = self.agents.get(agent)
        return () if known is None else known.processes.values()

    def mark_refused(self, agent: str, now: float) -> None:
        """Records that an agent is alive although its heartbeat was refused."""
        for process in self.list_processes(agent):
            process.reports.last_refused_at = now

    def forget_attempt(self, attempt: Attempt) -> None:
        """Drops an attempt but not its processes, see `drop_processes`."""
        job = attempt.job
        family = get_family(job)
        jobs = self._families.get(family, {})
        if self.attempts.pop(attempt.key, None) is not None:
            del jobs[job][attempt.number]
        if jobs.get(job):
            return
        jobs.pop(job, None)
        if not jobs:
            self._families.pop(family, None)
        self.former_attempts[job] = FormerAttempt(
            number=attempt.number,
            restart=attempt.restart,
            last_seen_at=attempt.last_seen_at,
            # Without any process, all have joined another world.
            is_finished=attempt.is_finished or not attempt.processes,
        )
        if len(self.former_attempts) > FORMER_ATTEMPTS_KEPT:
            for excess in take_turns(reversed(self.former_attempts))[FORMER_ATTEMPTS_KEPT:]:
                del self.former_attempts[excess]

    def drop_processes(self, attempt: Attempt, max_processes: int) -> bool:
        """Drops up to ``max_processes`` of a forgotten attempt's current processes, since dropping
        100,000 in one call takes long. Returns False once none remain.

        The references between their objects are cleared: otherwise these cycles would stay until a
        full garbage collection.
        """
        for _ in range(min(max_processes, len(attempt.processes))):
            _, process = attempt.processes.popitem()
            self._drop_process(process)
        if attempt.processes:
            return True
        for former in [p for p in self.processes.values() if p.attempt is attempt]:
            self._drop_process(former)
        attempt.twins.clear()
        while len(self._forgotten_processes) > FORGOTTEN_PROCESSES_KEPT:
            del self._forgotten_processes[next(iter(self._forgotten_processes))]
        return False

    def _drop_process(self, process: Process) -> None:
        self._unregister_process(process)
        self.foreign_groups.leave_groups(process)
        if process.is_alive:
            tenant = get_tenant(process.agent)
            self._forgotten_processes[tenant, process.host, process.key] = None
        for stream in process.streams.values():
            disconnect_channel(stream)
            state = stream.group_state
            if state is not None:
                state.members.clear()
                # Clearing all of them with the attempt, at the end, would take long.
                state.reference_hashes.clear()
                stream.group_state = None
        process.streams.clear()

    def is_urgent(self, agent: str) -> bool:
        """Whether the agent's next report may decide a diagnosis."""
        return any(process.is_urgent for process in self.list_processes(agent))

    def _apply_full_update(
        self,
        agent: ReportingAgent,
        beat: Heartbeat,
        update: ProcessUpdate,
        now: float,
    ) -> bool:
        identity = update.identity
        process = self.find_process(beat.agent, beat.host, update)
        if process is not None and is_owned_by_other(process, beat, now):
            self.foreign_reports += 1
            return True
        if process is not None and identity is not None and self.has_moved(process, identity):
            # The process reported a rank before init_process_group assigned it another one, or joins
            # another world.
            self._release_rank(process)
            process = None
        if process is None:
            if identity is None:
                return False
            process = self._register_process(beat, update.key, identity, now)
        elif identity is not None and identity.job != process.identity.job:
            self._index_process(process, identity.job)
        location = (beat.host, update.key)
        if agent.processes.get(location) is not process:
            self._leave_agent(process)
            self.agents.join_family(agent, get_family(process.identity.job))
            agent.processes[location] = process
            process.agent = beat.agent
            process.owner = get_owner(beat)
            process.attempt.owners.add(process.owner)
        return apply_process_update(process, update, now)

    def _leave_agent(self, process: Process) -> None:
        agent = self.agents.get(process.agent)
        if agent is not None:
            agent.processes.pop((process.host, process.key), None)

    def _unregister_process(self, process: Process) -> None:
        self._leave_agent(process)
        self._index_process(process, None)

    def _release_rank(self, process: Process) -> None:
        """Drops a process whose rank or world was another one than it reports now."""
        if process.holds_rank:
            process.attempt.assign_rank(None, process.rank)
            process.attempt.shrink_world()
        self._unregister_process(process)

    def _index_process(self, process: Process, job: str | None) -> None:
        """Makes a process the one that its host reports for a job; None: for no job."""
        former_job = process.identity.job
        former = (former_job, process.host, process.key)
        if self.processes.get(former) is process:
            del self.processes[former]
            change_count(self.process_counts, get_family(former_job), -1)
        if job is not None:
            key = (job, process.host, process.key)
            if key not in self.processes:
                change_count(self.process_counts, get_family(job), 1)
            self.processes[key] = process

    def choose_attempt(
        self, beat: Heartbeat, identity: ProcessIdentity, now: float
    ) -> tuple[str, Attempt | None]:
        """The name of the job that a new process belongs to, and its attempt: the latest of that job, or
        None if the process begins another.
        """
        worlds = self.list_family(identity.job)
        job = choose_job_name(worlds, self.former_attempts, identity, now)
        latest = self.latest_attempt(job)
        if latest is None:
            return job, None
        holder = latest.processes.get(identity.rank)
        if holder is not None and is_owned_by_other(holder, beat, now):
            return job, None
        is_accepted = accepts_process(latest, beat.host, identity, now - identity.started_s)
        return job, latest if is_accepted else None

    def _register_process(
        self,
        beat: Heartbeat,
        key: str,
        identity: ProcessIdentity,
        now: float,
    ) -> Process:
        """Adds a new process to the latest attempt of its job, or to a new attempt."""
        rank = identity.rank
        started_at = now - identity.started_s
        job, attempt = self.choose_attempt(beat, identity, now)
        latest = self.latest_attempt(job)
        if job != identity.job:
            self._release_members(self.list_family(identity.job), identity.master, job)
        holder = None if latest is None else latest.processes.get(rank)
        if attempt is None:
            last = latest or self.former_attempts.pop(job, None)
            attempt = Attempt(
                job=job,
                reported_job=identity.job,
                number=choose_attempt_number(last, identity, started_at),
                restart=identity.restart,
                opened_at=now,
                foreign_groups=self.foreign_groups,
            )
            self.attempts[attempt.key] = attempt
            family = self._families.setdefault(get_family(job), {})
            family.setdefault(job, {})[attempt.number] = attempt
        process = Process(
            attempt=attempt,
            key=key,
            host=beat.host,
            identity=identity,
            started_at=started_at,
            reports=ReportTimes(last_seen_at=now),
        )
        attempt.assign_rank(process, rank)
        former = None if latest is attempt else latest
        if former is not None and holder is not None and holder.is_alive:
            former.twins[rank] = process
            attempt.twins[rank] = holder
        self._index_process(process, identity.job)
        return process

    def has_moved(self, process: Process, identity: ProcessIdentity) -> bool:
        """Whether a process has another rank than before, or has joined another world of its job, or any
        world after it was only a member of a group without one.
        """
        if process.identity.rank != identity.rank:
            return True
        if process.identity.master == identity.master:
            return False
        if is_group_address(process.identity.master):
            return True
        for other in self.list_family(identity.job):
            if other is not process.attempt and identity.master in other.addresses:
                return True
        return not process.holds_rank

    def list_family(self, job: str) -> list[Attempt]:
        """The latest attempts of a job, and of its worlds that run beside it: JOB/ADDRESS:PORT."""
        latest = {}
        for attempt in self.iter_related(get_family(job)):
            if job in (attempt.job, attempt.reported_job):
                latest[attempt.job] = attempt
        return sorted(latest.values(), key=lambda attempt: (attempt.job != job, attempt.opened_at))

    def _release_members(self, worlds: list[Attempt], address: str, job: str) -> None:
        """Drops a world's processes that were taken for late ranks of another, to register them."""
        for attempt in worlds:
            if attempt.job == job or address not in attempt.addresses:
                continue
            for process in list(attempt.processes.values()):
                if process.identity.master == address:
                    self._release_rank(process)


def is_owned_by_other(process: Process, beat: Heartbeat, now: float) -> bool:
    """Whether the node agent of another owner reports the process, and has done so until now."""
    if process.agent == beat.agent or process.owner in ("", get_owner(beat)):
        return False
    return process.is_alive and now - process.reports.agent_seen_at <= OWNER_SILENT_S


def get_owner(beat: Heartbeat) -> str:
    return beat.owner or beat.agent


def choose_job_name(
    attempts: Collection[Attempt],
    former_attempts: Mapping[str, FormerAttempt],
    identity: ProcessIdentity,
    now: float,
) -> str:
    """The job that a new process belongs to: the one that it names, or JOB/ADDRESS:PORT for a further
    world of ranks, which runs under the same name at the same time.

    The members of a group that are no ranks of a world are a job of their own, JOB/ADDRESS as well.

    ``attempts`` are the latest attempts of the job and of its further worlds, ``former_attempts``
    those that were known before the server was restarted. Ranks of one world have one rendezvous. Another
    world replaces one in which a process has ended, as restarts do, or runs beside it.
    """
    job, address = identity.job, identity.master
    further_name = f"{job}/{address}"
    if is_group_address(address):
        return job if job == address else further_name
    if not is_known_address(address):
        return job
    attempts = [attempt for attempt in attempts if not attempt.is_of_group]
    for attempt in attempts:
        if address in attempt.addresses and not _is_held_by_other_world(attempt, identity):
            return attempt.job
    former = former_attempts.get(further_name)
    if former is not None and not former.is_finished:
        return further_name
    if all(address not in attempt.addresses for attempt in attempts):
        for attempt in attempts:
            if not attempt.addresses:
                return attempt.job
            is_same_size = attempt.world_size == identity.world_size
            if is_same_size and identity.rank not in attempt.processes and not attempt.is_finished:
                return attempt.job  # The rank is late, or has another address by mistake.
    if all(attempt.is_finished for attempt in attempts):
        return job
    replaceable = [a for a in attempts if _may_be_replaced(a, identity, now)]
    if not replaceable and len(attempts) < MAX_WORLDS:
        return further_name
    preferred = max(
        replaceable or attempts,
        key=lambda a: (
            bool(a.ended_ranks),
            a.world_size == identity.world_size,
            a.last_seen_at,
            a.job == job,
        ),
    )
    return preferred.job


def _is_held_by_other_world(attempt: Attempt, identity: ProcessIdentity) -> bool:
    """Whether the rank of a new process belongs to a running process with another rendezvous."""
    holder = attempt.processes.get(identity.rank)
    if holder is None or not holder.is_alive or holder.lifecycle is not Lifecycle.INITIALISED:
        return False
    address = holder.identity.master
    return is_known_address(address) and address != identity.master


def _may_be_replaced(attempt: Attempt, identity: ProcessIdentity, now: float) -> bool:
    """Whether a process of another world may begin a later attempt, or the attempt has no world."""
    return (
        bool(attempt.ended_ranks)
        or attempt.is_finished
        or not attempt.has_initialised
        or identity.restart > attempt.restart
        or now - attempt.last_seen_at > SUCCEEDED_SILENT_S
    )


def accepts_process(
    attempt: Attempt, host: str, identity: ProcessIdentity, started_at: float
) -> bool:
    """Whether a new process belongs to the latest attempt of its job. If not, the job was restarted:
    by its launcher, after the attempt finished, or while the holder of the rank is another process.
    """
    if identity.restart > attempt.restart:
        return False
    holder = attempt.processes.get(identity.rank)
    if holder is not None and (holder.exit is not None or holder.host != host):
        return False
    if not attempt.is_finished:
        return True
    # A job can fail before all of its ranks are first reported: a process that started before the
    # last known exit belongs to the same attempt.
    last_exit_at = max(process.exited_at or 0.0 for process in attempt.processes.values())
    return started_at <= last_exit_at


def choose_attempt_number(
    last: Attempt | FormerAttempt | None, identity: ProcessIdentity, started_at: float
) -> int:
    """The number for a new `Attempt` object of a process that the job's last attempt does not accept.

    It is the number of the attempt known before the server was restarted, if the process belongs to
    that one; else the next free number.
    """
    if last is None:
        return identity.restart
    if isinstance(last, FormerAttempt) and not last.is_finished:
        is_same = identity.restart == last.restart and started_at <= last.last_seen_at
        if is_same:
            return last.number
    return max(identity.restart, last.number + 1)
