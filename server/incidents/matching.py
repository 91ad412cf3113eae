"""Whether a verdict speaks of an incident that is open already: one root cause is one incident.
Pure.
"""

from __future__ import annotations

import enum

from hangwatch.model.incidents import Incident
from hangwatch.model.kinds import KINDS, Role, Severity, select_kinds
from hangwatch.model.verdicts import Verdict

_ENDS = frozenset(select_kinds(lambda spec: spec.role is Role.END))
_ROOTS = frozenset(select_kinds(lambda spec: spec.role is Role.ROOT))
_HANGS = frozenset(
    select_kinds(lambda spec: spec.role in (Role.END, Role.HANG) or spec.blocks_culprits)
)
_ALONE = frozenset(select_kinds(lambda spec: spec.role is Role.INDEPENDENT))


class Relation(enum.IntEnum):
    NONE = 0
    CONSEQUENCE = 1  # explained by the incident: keeps it open and changes nothing
    REFINES = 2  # the same root cause, better understood
    SAME = 3


def is_hang(incident: Incident) -> bool:
    """Ranks cannot go on because of it."""
    return bool(incident.waiting) or (
        incident.kind in _HANGS and incident.severity is Severity.ALERT
    )


def relate_verdict(incident: Incident, verdict: Verdict, gathering: bool) -> Relation:
    """How a verdict on the same attempt stands to an open incident; ``gathering`` while its
    evidence still comes in.
    """
    if verdict.kind in _ALONE or incident.kind in _ALONE:
        return (
            Relation.SAME
            if verdict.kind is incident.kind and _same_place(incident, verdict)
            else Relation.NONE
        )
    if verdict.kind is incident.kind:
        if (same := _same_kind(incident, verdict)) is not Relation.NONE:
            return same
    elif _same_position(incident, verdict) and verdict.kind not in _ENDS:
        rises = incident.severity is Severity.WARNING and verdict.severity is Severity.ALERT
        falls = incident.severity is Severity.ALERT and verdict.severity is Severity.WARNING
        return Relation.REFINES if rises or (gathering and not falls) else Relation.CONSEQUENCE
    if incident.severity is Severity.WARNING:
        return _beside_warning(incident, verdict)
    if incident.kind in _ENDS:
        return _after_end(incident, verdict, gathering)
    if not is_hang(incident):
        return Relation.NONE
    return _during_hang(incident, verdict, gathering)


def _same_kind(incident: Incident, verdict: Verdict) -> Relation:
    spec = KINDS[incident.kind]
    if spec.blocks_culprits:
        return (
            Relation.SAME if _share_culprits(incident, verdict) else Relation.NONE
        )  # no rank is on two cycles
    if _same_position(incident, verdict):
        return Relation.SAME
    if spec.is_call_error:
        # Once the calls of a group have parted they stay apart: later differences of it are the
        # same one.
        return Relation.CONSEQUENCE if _same_group(incident, verdict) else Relation.NONE
    return (
        Relation.SAME
        if incident.culprits and set(incident.culprits) == set(verdict.culprits)
        else Relation.NONE
    )


def _beside_warning(incident: Incident, verdict: Verdict) -> Relation:
    if not _share_culprits(incident, verdict):
        return Relation.NONE
    return Relation.REFINES if verdict.severity is Severity.ALERT else Relation.CONSEQUENCE


def _after_end(incident: Incident, verdict: Verdict, gathering: bool) -> Relation:
    """A process has ended: whoever waits or dies after it does so because of it."""
    if verdict.kind in _ROOTS:
        return Relation.REFINES if gathering and _share_ranks(incident, verdict) else Relation.NONE
    # Nodes report at their own pace: which death was the first may be known only later. Whoever
    # dies after a node was lost follows.
    return (
        Relation.REFINES
        if gathering and verdict.kind in _ENDS and not KINDS[incident.kind].is_unreachable
        else Relation.CONSEQUENCE
    )


def _during_hang(incident: Incident, verdict: Verdict, gathering: bool) -> Relation:
    if verdict.kind in _ENDS:
        return Relation.CONSEQUENCE  # the launcher ends a job that hangs, and people do
    if not _share_ranks(incident, verdict):
        return Relation.NONE
    if verdict.kind in _ROOTS:
        if not verdict.waiting and not KINDS[verdict.kind].blocks_culprits:
            return Relation.NONE  # a bug of its own, which hangs nobody
        return (
            Relation.REFINES if gathering and incident.kind not in _ROOTS else Relation.CONSEQUENCE
        )
    if incident.kind in _ROOTS or verdict.severity is Severity.WARNING or not gathering:
        return Relation.CONSEQUENCE
    return Relation.REFINES


def _same_group(incident: Incident, verdict: Verdict) -> bool:
    mine, its = incident.group, verdict.group
    return (
        mine is not None and its is not None and mine.name == its.name and mine.ranks == its.ranks
    )


def _same_position(incident: Incident, verdict: Verdict) -> bool:
    if incident.seq is None or incident.seq != verdict.seq or not _same_group(incident, verdict):
        return False
    # Each channel between two ranks of a group counts its own calls: only its ends tell it from the
    # others.
    calls = (*incident.verdict.calls, *verdict.calls)
    if all(call_class.call.peer is None for call_class in calls):
        return True
    return _share_culprits(incident, verdict)


def _same_place(incident: Incident, verdict: Verdict) -> bool:
    return _same_group(incident, verdict) or set(incident.culprits) == set(verdict.culprits)


def _share_culprits(incident: Incident, verdict: Verdict) -> bool:
    return not set(incident.culprits).isdisjoint(verdict.culprits)


def _share_ranks(incident: Incident, verdict: Verdict) -> bool:
    its = {*verdict.culprits, *verdict.waiting}
    if (
        incident.kind is verdict.kind and KINDS[verdict.kind].blocks_culprits
    ):  # who waits for two cycles does not make them one
        return not (
            its.isdisjoint(incident.culprits) and set(verdict.culprits).isdisjoint(incident.waiting)
        )
    return not (
        its.isdisjoint(incident.culprits) and its.isdisjoint(incident.waiting)
    )  # each ends with the first that both have
