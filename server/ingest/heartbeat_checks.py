"""What a heartbeat must fulfil beyond its types, before any of it is applied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from pydantic import ValidationError

from hangwatch.model.groups import count_ranks
from hangwatch.protocol import heartbeat
from hangwatch.protocol.signatures import may_report_job
from hangwatch.tracking.fleet import Fleet

from ..core import limits
from ..core.memory import read_resident_bytes
from ..core.problems import Problem, describe_validation_errors
from . import decoding

# A shorter body holds no longer text or list: an item takes two bytes.
_UNSUSPICIOUS_BYTES = min(limits.STRING.most, 2 * limits.LIST.most)
_REMEDY = "run another hangwatch-server for the rest"


def parse_heartbeat(body: bytes) -> heartbeat.Heartbeat:
    """A heartbeat that can be applied without errors. Raises Problem."""
    try:
        beat = decoding.decode_heartbeat(body)
    except ValidationError as error:
        errors = describe_validation_errors(
            error.errors(include_input=False, include_url=False, include_context=False)
        )
        raise Problem(422, "not a heartbeat; nothing of it was applied", errors=errors) from None
    if beat.version != heartbeat.PROTOCOL_VERSION:
        raise Problem(
            422,
            f"this heartbeat has protocol version {beat.version}, this server has version"
            f" {heartbeat.PROTOCOL_VERSION}: install the same release of hangwatch on the training"
            " nodes and here",
        )
    if len(body) > _UNSUSPICIOUS_BYTES:
        _check_sizes(msgspec.json.decode(body))
    _check_names(beat)
    _check_ranks(beat)
    return beat


def check_job(beat: heartbeat.Heartbeat, allowed: str | None) -> None:
    """Raises Problem if the heartbeat reports another job than its token allows."""
    for process in beat.processes:
        if process.identity is not None and not may_report_job(allowed, process.identity.job):
            raise Problem(
                403,
                f"the token is that of job {allowed!r}, and does not allow to report job"
                f" {process.identity.job!r}",
            )


def _check_sizes(value: Any) -> None:
    """Raises Problem for a text or a list beyond the limits."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            if len(item) > limits.STRING.most:
                raise limits.STRING.make_problem(f"a text of {len(item)} characters")
        elif isinstance(item, list):
            if len(item) > limits.LIST.most:
                raise limits.LIST.make_problem(f"a list of {len(item)} items")
            pending += item
        elif isinstance(item, dict):
            pending += item
            pending += item.values()


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
    _check_members(beat, fleet)


def _check_processes(
    agent: str, new_identities: list[heartbeat.ProcessIdentity], fleet: Fleet
) -> None:
    _check_resident_memory()
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


def _check_members(beat: heartbeat.Heartbeat, fleet: Fleet) -> None:
    """Counts what the heartbeat's groups and worlds would add to their attempts."""
    for process in beat.processes:
        identities = list(_iter_identities((process,)))
        if not identities and process.identity is None:
            continue
        tracked = fleet.processes.get((beat.host, process.key))
        attempt = None if tracked is None else tracked.attempt
        if attempt is None and process.identity is not None:
            attempt = fleet.latest_attempt(process.identity.job)
        added = count_members(i for i in identities if attempt is None or not attempt.has_group(i))
        if process.identity is not None:
            known_size = 0 if attempt is None else attempt.world_size
            added += max(0, process.identity.world_size - known_size)
        if not added:
            continue
        _check_resident_memory()
        known = 0 if attempt is None else attempt.count_members()
        if known + added > limits.ATTEMPT_MEMBERS.most:
            raise limits.ATTEMPT_MEMBERS.make_problem(f"process {process.key}")
        if fleet.count_members() + added > limits.MEMBERS.most:
            raise limits.MEMBERS.make_problem(remedy=_REMEDY)


def _check_resident_memory() -> None:
    if read_resident_bytes() > limits.MEMORY.most:
        raise limits.MEMORY.make_problem(remedy=_REMEDY)
