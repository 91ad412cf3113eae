"""What a heartbeat must fulfil beyond its types, before any of it is applied."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from hangwatch.model.groups import count_ranks
from hangwatch.model.ranks import AttemptKey
from hangwatch.protocol import heartbeat
from hangwatch.protocol.signatures import may_report_job
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.fleet import Fleet

from ..core import limits
from ..core.memory import read_resident_bytes
from ..core.problems import Problem
from . import decoding

# A shorter body holds no longer text or list: an item takes two bytes.
_UNSUSPICIOUS_BYTES = min(limits.STRING.most, 2 * limits.LIST.most)
# A text, or what begins, ends or continues a list or an object.
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{},]', re.DOTALL)
_QUOTE, _COMMA, _OPENING = b'"'[0], b","[0], b"[{"
_REMEDY = "run another hangwatch-server for the rest"


def parse_heartbeat(body: bytes) -> heartbeat.Heartbeat:
    """A heartbeat that can be applied without errors. Raises Problem."""
    if len(body) > _UNSUSPICIOUS_BYTES:
        check_volume(count_objects(body), count_values(body))
        _check_sizes(body)
    try:
        beat = decoding.decode_heartbeat(body)
    except (ValueError, RecursionError) as error:
        _check_version(decoding.decode_head(body).version)
        raise _make_refusal(error) from None
    _check_version(beat.version)
    _check_names(beat)
    _check_ranks(beat)
    return beat


def _check_version(version: int) -> None:
    """Raises Problem if heartbeats of this protocol version cannot be read."""
    if version not in heartbeat.ACCEPTED_VERSIONS:
        raise Problem(
            422,
            f"this heartbeat has protocol version {version}, this server has version"
            f" {heartbeat.PROTOCOL_VERSION}: install the same release of hangwatch on the training"
            " nodes and here",
        )


def check_job(beat: heartbeat.Heartbeat, allowed: str | None) -> None:
    """Raises Problem if the heartbeat reports another job than its token allows."""
    for process in beat.processes:
        if process.identity is not None and not may_report_job(allowed, process.identity.job):
            raise Problem(
                403,
                f"the token is that of job {allowed!r}, and does not allow to report job"
                f" {process.identity.job!r}",
            )


def count_objects(body: bytes) -> int:
    """At least the number of objects in the JSON; more if its texts have braces."""
    return body.count(b"{")


def count_values(body: bytes) -> int:
    """At least the number of values in the JSON; more if its texts have commas or brackets."""
    return body.count(b",") + body.count(b"[") + body.count(b"{")


def check_volume(objects: int, values: int) -> None:
    """Raises Problem for so much JSON that parsing it could exhaust the memory."""
    if objects > limits.OBJECTS.most:
        raise limits.OBJECTS.make_problem(f"{objects} objects")
    if values > limits.VALUES.most:
        raise limits.VALUES.make_problem(f"{values} values")


def _check_sizes(body: bytes) -> None:
    """Raises Problem for a text or a list beyond the limits, without building either, and for
    anything but JSON.
    """
    try:
        msgspec.json.decode(body, type=msgspec.Raw)  # so that each text and list has an end
    except (ValueError, RecursionError) as error:
        raise _make_refusal(error) from None
    counts: list[int] = []  # of each list around the token: its commas so far; of an object: -1
    for token in _TOKEN.finditer(body):
        first = body[token.start()]
        if first == _QUOTE:
            # Each character takes a byte or more.
            if token.end() - token.start() > limits.STRING.most:
                length = len(msgspec.json.decode(token[0], type=str))
                if length > limits.STRING.most:
                    raise limits.STRING.make_problem(f"a text of {length} characters")
        elif first == _COMMA:
            if counts and counts[-1] >= 0:
                counts[-1] += 1
                if counts[-1] >= limits.LIST.most:
                    raise limits.LIST.make_problem(f"a list of over {limits.LIST.most} items")
        elif first in _OPENING:
            counts.append(0 if first == _OPENING[0] else -1)
        else:
            counts.pop()


def _make_refusal(error: Exception) -> Problem:
    return Problem(
        422,
        "not a heartbeat; nothing of it was applied",
        errors=[{"at": "body", "message": str(error)[:200]}],
    )


def _check_names(beat: heartbeat.Heartbeat) -> None:
    for name in (
        beat.host,
        beat.agent,
        *(process.key for process in beat.processes),
        *(process.identity.job for process in beat.processes if process.identity),
    ):
        if not 0 < len(name) <= limits.NAME.most or not name.isprintable():
            raise limits.NAME.make_problem(f"the name {name[:40]!r}")


def _check_ranks(beat: heartbeat.Heartbeat) -> None:
    for process in beat.processes:
        identity = process.identity
        if identity is not None and not 0 <= identity.restart <= limits.RESTART.most:
            raise limits.RESTART.make_problem(f"{identity.restart} restarts of {process.key}")
        if identity is not None and not (
            0 <= identity.rank < limits.RANK.most and 0 <= identity.world_size <= limits.RANK.most
        ):
            raise limits.RANK.make_problem(
                f"rank {identity.rank} of {identity.world_size} of process {process.key}"
            )
    if (members := count_members(_iter_identities(beat.processes))) > limits.HEARTBEAT_MEMBERS.most:
        raise limits.HEARTBEAT_MEMBERS.make_problem(f"{members} members of process groups")


def count_members(identities: Iterable[heartbeat.StreamIdentity]) -> int:
    """How many members the different groups have together. Raises Problem for an invalid list of
    ranks.
    """
    members = 0
    for ranks in {identity.ranks for identity in identities}:
        try:
            count = count_ranks(ranks)
        except ValueError as error:
            raise Problem(
                422, f"the ranks {ranks[:40]!r} of a group: {error}; nothing was applied"
            ) from None
        if count > limits.RANK.most:
            raise limits.RANK.make_problem(f"{count} ranks of a group")
        members += count
    return members


def _iter_identities(
    processes: Iterable[heartbeat.ProcessUpdate],
) -> Iterator[heartbeat.StreamIdentity]:
    for process in processes:
        for stream in process.sequences:
            if stream.identity is not None:
                yield stream.identity


def check_memory(
    beat: heartbeat.Heartbeat, fleet: Fleet, is_known_agent: bool, agent_count: int
) -> None:
    """Raises Problem if a heartbeat would exceed a limit on what is kept in memory."""
    if not is_known_agent and agent_count >= limits.AGENTS.most:
        raise limits.AGENTS.make_problem(remedy=_REMEDY)
    new_identities = [
        process.identity
        for process in beat.processes
        if process.identity is not None and (beat.host, process.key) not in fleet.processes
    ]
    if new_identities:
        _check_processes(beat.agent, new_identities, fleet)
    for update in beat.processes:
        # Few processes come near the limit: only these are counted exactly.
        if len(update.sequences) > limits.STREAMS.most // 2:
            _check_stream_count(beat.host, update, fleet)
    describes_groups = next(_iter_identities(beat.processes), None) is not None
    adds_members = (describes_groups or bool(new_identities)) and _check_members(beat, fleet)
    if (new_identities or adds_members) and read_resident_bytes() > limits.MEMORY.most:
        raise limits.MEMORY.make_problem(remedy=_REMEDY)


def _check_processes(
    agent: str, new_identities: list[heartbeat.ProcessIdentity], fleet: Fleet
) -> None:
    if len(fleet.processes) + len(new_identities) > limits.PROCESSES.most:
        raise limits.PROCESSES.make_problem(remedy=_REMEDY)
    new_jobs = {identity.job for identity in new_identities}
    jobs = fleet.list_jobs(agent) | new_jobs
    if len(jobs) > limits.JOBS_PER_AGENT.most:
        raise limits.JOBS_PER_AGENT.make_problem(f"{len(jobs)} jobs")
    attempt_counts = Counter(key.job for key in fleet.attempts)
    for job in new_jobs:
        if attempt_counts[job] >= limits.ATTEMPTS_PER_JOB.most:
            raise limits.ATTEMPTS_PER_JOB.make_problem(f"job {job}", "give it another name")
    new_jobs -= {key.job for key in fleet.attempts}
    if len(fleet.attempts) + len(new_jobs) > limits.ATTEMPTS.most and new_jobs:
        raise limits.ATTEMPTS.make_problem(remedy=_REMEDY)


def _check_stream_count(host: str, update: heartbeat.ProcessUpdate, fleet: Fleet) -> None:
    uids = {stream.uid for stream in update.sequences}
    known = fleet.processes.get((host, update.key))
    if known is not None:
        uids |= known.process.streams.keys()
    if len(uids) > limits.STREAMS.most:
        raise limits.STREAMS.make_problem(f"process {update.key}")


@dataclass(slots=True)
class _Growth:
    """What a heartbeat adds to an attempt, or to a job that has none yet."""

    attempt: Attempt | None
    world_size: int = 0
    opened_world_size: int = 0  # of a new process, which may open another attempt
    groups: set[heartbeat.StreamIdentity] = field(default_factory=set)

    def count_members(self) -> int:
        """The additional members of its world and groups. Raises Problem."""
        known_size = 0 if self.attempt is None else self.attempt.world_size
        return count_members(self.groups) + max(0, self.world_size - known_size)


def _list_growth(beat: heartbeat.Heartbeat, fleet: Fleet) -> list[_Growth]:
    growth: dict[AttemptKey | str, _Growth] = {}  # by attempt, or by the name of a new job
    for process in beat.processes:
        identity = process.identity
        groups = list(_iter_identities((process,)))
        if identity is None and not groups:
            continue  # almost all processes of almost all heartbeats
        tracked = fleet.processes.get((beat.host, process.key))
        if tracked is not None:
            grown = growth.setdefault(tracked.attempt.key, _Growth(tracked.attempt))
        elif identity is not None:
            latest = fleet.latest_attempt(identity.job)
            key = identity.job if latest is None else latest.key
            grown = growth.setdefault(key, _Growth(latest))
            grown.opened_world_size = max(grown.opened_world_size, identity.world_size)
        else:
            continue  # nothing of an unknown process is applied
        if identity is not None:
            grown.world_size = max(grown.world_size, identity.world_size)
        grown.groups.update(
            group for group in groups if grown.attempt is None or not grown.attempt.has_group(group)
        )
    return list(growth.values())


def _check_members(beat: heartbeat.Heartbeat, fleet: Fleet) -> bool:
    """Whether its groups and worlds add members to those in memory. Raises Problem if too many."""
    added = 0
    for growth in _list_growth(beat, fleet):
        members = growth.count_members()
        known = 0 if growth.attempt is None else growth.attempt.count_members()
        if members and known + members > limits.ATTEMPT_MEMBERS.most:
            raise limits.ATTEMPT_MEMBERS.make_problem()
        added += max(members, growth.opened_world_size)
    if added and fleet.count_members() + added > limits.MEMBERS.most:
        raise limits.MEMBERS.make_problem(remedy=_REMEDY)
    return added > 0
