"""Decodes heartbeats, and checks before any of it is applied that each is within the limits and
reports no other job than its sender may.

msgspec decodes them straight into the dataclasses of the protocol, whose annotations are the schema.
Generated `msgspec.Struct` types would take half the time (25 instead of 47 us for 8 ranks with 4
groups each, 7 instead of 10 us for a brief heartbeat, CPython 3.11), but `dataclasses.replace` and
`isinstance` fail on them. With ``slots`` in the messages, msgspec takes 109 us for the same 8 ranks.

It refuses values outside of the bounds in these annotations (`hangwatch.model.bounds`), and accepts
compatible types, such as a number that is written as a string. The first error ends the decoding.

What is kept in memory counts against the quota of the family of jobs for which it is reported.
"""

from __future__ import annotations

import functools
import json
import operator
import types
import typing
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, is_dataclass
from typing import Annotated, Any

import msgspec

from hangwatch.model.bounds import MAX_INTEGER, TYPE_BOUNDS, Bounds
from hangwatch.model.groups import count_ranks
from hangwatch.model.ranks import AttemptKey
from hangwatch.protocol import heartbeat
from hangwatch.protocol.heartbeat import Heartbeat, get_family
from hangwatch.protocol.request_signing import may_report_job
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.fleet import Fleet

from ..core import limits
from ..core.problems import Problem

# A body of at most this size does not have too many values.
_UNSUSPICIOUS_BYTES = limits.OBJECTS.maximum
# A larger body is only decoded by msgspec, which passes over 60 MB of unknown members in 50 ms. Python's
# json would build them, which takes seconds.
_MAX_LENIENT_BYTES = 4 << 20
_REMEDY = "run another hangwatch-server for the rest"

_LONG_LIST = f"Expected `array` of length <= {limits.LIST.maximum} - at "  # as msgspec words it
# The errors of msgspec, json and UTF-8 are ValueErrors.
_DECODING_ERRORS = (ValueError, RecursionError)


def parse_heartbeat(body: bytes) -> Heartbeat:
    """A heartbeat that can be applied without errors. Raises Problem."""
    if len(body) > _UNSUSPICIOUS_BYTES:
        BodyVolume().add_part(body)
    try:
        beat = decode_heartbeat(body)
    except _DECODING_ERRORS as error:
        _check_version(decode_head(body).version)
        message = str(error)[:200]
        if message.startswith(_LONG_LIST):
            raise limits.LIST.make_problem(message.removeprefix(_LONG_LIST)) from None
        raise Problem(
            422,
            "not a heartbeat; nothing of it was applied",
            errors=[{"at": "body", "message": message}],
        ) from None
    _check_version(beat.version)
    groups = [
        stream.identity
        for process in beat.processes
        for stream in process.streams
        if stream.identity is not None
    ]
    if groups:
        limits.HEARTBEAT_MEMBERS.check(count_members(groups), "{} members of process groups")
    return beat


def _check_version(version: int) -> None:
    """Raises Problem for a protocol version that this server does not read."""
    if version != heartbeat.PROTOCOL_VERSION:
        raise Problem(
            422,
            f"this heartbeat has protocol version {version}, this server has version"
            f" {heartbeat.PROTOCOL_VERSION}: install the same release of hangwatch on the training"
            " nodes and here",
        )


@dataclass(slots=True)
class BodyVolume:
    """How much JSON the parts of a body hold so far."""

    objects: int = 0
    values: int = 0

    def add_part(self, part: bytes) -> None:
        """Raises Problem for more than a heartbeat may have."""
        objects = part.count(b"{")
        self.objects += objects
        self.values += objects + part.count(b"[") + part.count(b",")
        limits.OBJECTS.check(self.objects, "{} objects")
        limits.VALUES.check(self.values, "{} values")


def decode_heartbeat(body: bytes) -> Heartbeat:
    """A body whose volume was checked. Raises ValueError or RecursionError if it is invalid."""
    decoder = _heartbeat_decoder()
    try:
        return decoder.decode(body)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        # Python writes half of a surrogate pair where a file's name is not UTF-8.
        if len(body) > _MAX_LENIENT_BYTES:
            raise
        text = json.dumps(json.loads(body), ensure_ascii=False)
        return decoder.decode(text.encode(errors="replace"))


@functools.cache
def _heartbeat_decoder() -> msgspec.json.Decoder[Heartbeat]:
    """The decoder, which refuses values out of bounds. It passes over members that it does not know,
    without building them.

    msgspec reads a message's bounds from its annotations when it first sees its class, and keeps
    them. The protocol has bounds of its own there, since node agents have no msgspec.
    """
    declared: dict[type, dict[str, Any]] = {}
    try:
        _bound_type(Heartbeat, declared)
        return msgspec.json.Decoder(Heartbeat, strict=False)
    finally:
        for message, annotations in declared.items():
            message.__annotations__ = annotations


def _bound_type(hint: Any, declared: dict[type, dict[str, Any]]) -> Any:
    """The type with msgspec's bounds. ``declared`` keeps the annotations of messages."""
    if is_dataclass(hint) or hasattr(hint, "_fields"):
        if hint not in declared:
            declared[hint] = dict(hint.__annotations__)
            hints = typing.get_type_hints(hint, include_extras=True)
            hint.__annotations__ = {
                name: _bound_type(inner, declared) for name, inner in hints.items()
            }
        return hint
    if hint in TYPE_BOUNDS:
        return _make_bounded(hint, TYPE_BOUNDS[hint])
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Annotated:
        return _make_bounded(*arguments)
    if not arguments:
        return hint
    bounded = tuple(_bound_type(argument, declared) for argument in arguments)
    if isinstance(hint, types.UnionType):
        return functools.reduce(operator.or_, bounded)
    made = typing.get_origin(hint)[bounded]
    if bounded[-1] is ...:
        return Annotated[made, msgspec.Meta(max_length=limits.LIST.maximum)]
    return made


def _make_bounded(kind: type, bounds: Bounds) -> Any:
    if kind is str:
        meta = msgspec.Meta(
            min_length=int(bounds.least),
            max_length=int(bounds.greatest),
            pattern=bounds.pattern or None,
        )
    elif kind is float:
        meta = msgspec.Meta(ge=bounds.least, le=bounds.greatest)
    else:  # msgspec knows no larger bound of an integer than 2**63 - 1
        greatest = int(bounds.greatest) if bounds.greatest <= MAX_INTEGER else None
        meta = msgspec.Meta(ge=int(bounds.least), le=greatest)
    return Annotated[kind, meta]


class HeartbeatHead(msgspec.Struct):
    """The part that is read of a heartbeat that is not decoded as a whole."""

    agent: str | None = None
    version: int = 1


def decode_head(body: bytes) -> HeartbeatHead:
    """Decodes the head of a heartbeat; it names no agent if the body is not a heartbeat."""
    try:
        return msgspec.json.decode(body, type=HeartbeatHead)
    except _DECODING_ERRORS:
        return HeartbeatHead()


def count_members(identities: Iterable[heartbeat.StreamIdentity]) -> int:
    """The members of all different groups. Raises Problem for an invalid list of ranks."""
    members = 0
    for ranks in {identity.members_key: identity.ranks for identity in identities}.values():
        try:
            count = count_ranks(ranks)
        except ValueError as error:
            raise Problem(
                422, f"the ranks {ranks[:40]!r} of a group: {error}; nothing was applied"
            ) from None
        limits.RANK.check(count, "{} ranks of a group")
        members += count
    return members


def check_job(beat: Heartbeat, allowed: str | None) -> None:
    """Raises Problem if the heartbeat reports another job than its token allows."""
    for process in beat.processes:
        if process.identity is not None and not may_report_job(allowed, process.identity.job):
            raise Problem(
                403,
                f"the token is that of job {allowed!r}, and does not allow to report job"
                f" {process.identity.job!r}",
            )


def check_memory(beat: Heartbeat, fleet: Fleet, now: float) -> None:
    """Raises Problem if a heartbeat, received at ``now``, would exceed a limit on what is kept in memory."""
    if beat.agent not in fleet.agents:
        jobs = {update.identity.job for update in beat.processes if update.identity is not None}
        families = set(map(get_family, jobs)) or fleet.agents.get_families(beat.agent)
        for family in families:
            count = fleet.agents.counts[family] + 1
            limits.AGENTS.check_share(count, len(fleet.agents) + 1, family, _REMEDY)
    growing = []  # usually none
    new_identities = []
    for update in beat.processes:
        identity = update.identity
        if identity is not None and fleet.find_process(beat.agent, beat.host, update) is None:
            new_identities.append(identity)
        if identity is not None or any(stream.identity is not None for stream in update.streams):
            growing.append(update)
        # Few processes come near the limit: only these are counted exactly.
        if len(update.streams) > limits.STREAMS.maximum // 2:
            uids = {stream.uid for stream in update.streams}
            known = fleet.find_process(beat.agent, beat.host, update)
            if known is not None:
                uids |= known.streams.keys()
            limits.STREAMS.check(len(uids), f"process {update.key}")
    if not growing:
        return
    if new_identities:
        _check_new_processes(beat.agent, new_identities, fleet)
    added_members = _count_added_members(beat, growing, fleet, now)
    if added_members:
        total = fleet.count_members() + added_members.total()
        for family, count in added_members.items():
            count += fleet.count_members(family)
            limits.MEMBERS.check_share(count, total, family, _REMEDY)
    if new_identities or added_members:
        limits.MEMORY.check(limits.read_resident_bytes(), remedy=_REMEDY)
    if fleet.restricted_family is not None:
        _check_restriction(beat, growing, fleet)


def _check_restriction(
    beat: Heartbeat, updates: Iterable[heartbeat.ProcessUpdate], fleet: Fleet
) -> None:
    """Raises Problem for new processes, groups and channels of the family that takes the most memory."""
    for update in updates:
        known = fleet.find_process(beat.agent, beat.host, update)
        if known is not None:
            family = get_family(known.attempt.job)
            is_growing = any(
                s.identity is not None and s.uid not in known.streams for s in update.streams
            )
        else:
            family = get_family(update.identity.job) if update.identity is not None else ""
            is_growing = update.identity is not None
        if is_growing and family == fleet.restricted_family:
            raise limits.MEMORY.make_problem(f"job {family!r} takes the most of it", _REMEDY)


def _check_new_processes(
    agent: str, identities: Iterable[heartbeat.ProcessIdentity], fleet: Fleet
) -> None:
    """Raises Problem if there would be too many processes, jobs or attempts."""
    added = Counter(get_family(identity.job) for identity in identities)
    total = len(fleet.processes) + sum(added.values())
    for family, count in added.items():
        count += fleet.process_counts[family]
        limits.PROCESSES.check_share(count, total, family, _REMEDY)
    # Each further process of a rank begins another attempt of its job.
    attempts: Counter[str] = Counter()
    for (job, _), count in Counter((i.job, i.rank) for i in identities).items():
        attempts[job] = max(attempts[job], count)
    new_jobs = set(attempts)
    limits.JOBS_PER_AGENT.check(len(fleet.list_jobs(agent) | new_jobs), "{} jobs")
    for job in new_jobs:
        count = len(fleet.list_attempts(job)) + attempts[job]
        limits.ATTEMPTS_PER_JOB.check(count, f"job {job}", "give it another name")
    begun: Counter[str] = Counter()
    for job, count in attempts.items():
        begun[get_family(job)] += count - (fleet.latest_attempt(job) is not None)
    total = len(fleet.attempts) + begun.total()
    for family, count in (+begun).items():
        count += sum(1 for _ in fleet.iter_related(family))
        limits.ATTEMPTS.check_share(count, total, family, _REMEDY)


@dataclass(slots=True)
class _Growth:
    """The addition of a heartbeat to an attempt of a job; None: to one that it begins."""

    job: str
    attempt: Attempt | None
    world_size: int = 0
    groups: set[heartbeat.StreamIdentity] = field(default_factory=set)


def _count_added_members(
    beat: Heartbeat, processes: Iterable[heartbeat.ProcessUpdate], fleet: Fleet, now: float
) -> Counter[str]:
    """The members that groups and worlds add, by family. Raises Problem if an attempt would have too
    many.
    """
    growth: dict[AttemptKey | tuple[str, int, int], _Growth] = {}

    def add_process(grown: _Growth, process: heartbeat.ProcessUpdate) -> None:
        if process.identity is not None:
            grown.world_size = max(grown.world_size, process.identity.world_size)
        for stream in process.streams:
            group = stream.identity
            if group is None:
                continue
            if grown.attempt is None or not grown.attempt.has_group_of(group.members_key):
                grown.groups.add(group)

    new = []
    for process in processes:
        identity = process.identity
        reported = fleet.find_process(beat.agent, beat.host, process)
        if reported is not None and (identity is None or not fleet.has_moved(reported, identity)):
            attempt = reported.attempt
            add_process(growth.setdefault(attempt.key, _Growth(attempt.job, attempt)), process)
        elif identity is not None:  # updates of an unknown process are not applied
            new.append((process, identity, *fleet.choose_attempt(beat, identity, now)))
    # One process that begins an attempt draws later ones of its job into that. Each further process of a
    # rank begins another.
    beginning = {job for _, _, job, attempt in new if attempt is None}
    seen: Counter[tuple[str, int]] = Counter()
    for process, identity, job, latest in new:
        seen[job, identity.rank] += 1
        times = seen[job, identity.rank]
        if latest is not None and job not in beginning and times == 1:
            grown = growth.setdefault(latest.key, _Growth(job, latest))
        else:
            grown = growth.setdefault((job, identity.restart, times), _Growth(job, None))
        add_process(grown, process)
    added: Counter[str] = Counter()
    for grown in growth.values():
        known_count = known_size = 0
        if grown.attempt is not None:
            known_count = grown.attempt.count_members()
            known_size = grown.attempt.world_size
        members = count_members(grown.groups) + max(0, grown.world_size - known_size)
        if members:
            limits.ATTEMPT_MEMBERS.check(known_count + members)
            added[get_family(grown.job)] += members
    return added
