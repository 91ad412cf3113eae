"""Whether a verdict concerns an incident that is already open: one root cause is one incident.
Pure.
"""

from __future__ import annotations

import enum

from hangwatch.model.incidents import Incident
from hangwatch.model.kind_spec import Role, Severity
from hangwatch.model.kinds import KINDS, select_kinds
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
    """Ranks are blocked because of it."""
    return bool(incident.waiting) or (
        incident.kind in _HANGS and incident.severity is Severity.ALERT
    )


def relate_verdict(incident: Incident, verdict: Verdict, gathering: bool) -> Relation:
    """How a verdict on the same attempt relates to an open incident. ``gathering``: the incident
    is so new that its evidence is still being collected.
    """
    if verdict.kind in _ALONE or incident.kind in _ALONE:
        is_same = verdict.kind is incident.kind and _has_same_location(incident, verdict)
        return Relation.SAME if is_same else Relation.NONE
    if verdict.kind is incident.kind:
        if (same := _relate_same_kind(incident, verdict)) is not Relation.NONE:
            return same
    elif _has_same_position(incident, verdict) and verdict.kind not in _ENDS:
        rises = incident.severity is Severity.WARNING and verdict.severity is Severity.ALERT
        falls = incident.severity is Severity.ALERT and verdict.severity is Severity.WARNING
        return Relation.REFINES if rises or (gathering and not falls) else Relation.CONSEQUENCE
    if incident.severity is Severity.WARNING:
        return _relate_to_warning(incident, verdict)
    if incident.kind in _ENDS:
        return _relate_to_end(incident, verdict, gathering)
    if not is_hang(incident):
        return Relation.NONE
    return _relate_to_hang(incident, verdict, gathering)


def _relate_same_kind(incident: Incident, verdict: Verdict) -> Relation:
    spec = KINDS[incident.kind]
    if spec.blocks_culprits:
        # No rank is on two cycles.
        return Relation.SAME if _share_culprits(incident, verdict) else Relation.NONE
    if _has_same_position(incident, verdict):
        return Relation.SAME
    if spec.is_call_error:
        if not _has_same_group(incident, verdict):
            return Relation.NONE
        # The calls of a group stay different after a divergence: later differences have the same
        # cause. But where it began may be found later.
        is_exact = bool(incident.verdict.calls)
        if is_exact or incident.seq is None or verdict.seq is None or verdict.seq > incident.seq:
            return Relation.CONSEQUENCE
        return Relation.REFINES
    is_same = incident.culprits and set(incident.culprits) == set(verdict.culprits)
    return Relation.SAME if is_same else Relation.NONE


def _relate_to_warning(incident: Incident, verdict: Verdict) -> Relation:
    if not _share_culprits(incident, verdict):
        return Relation.NONE
    return Relation.REFINES if verdict.severity is Severity.ALERT else Relation.CONSEQUENCE


def _relate_to_end(incident: Incident, verdict: Verdict, gathering: bool) -> Relation:
    """A process has ended: ranks that wait or die after it do so because of it."""
    if verdict.kind in _ROOTS:
        return Relation.REFINES if gathering and _share_ranks(incident, verdict) else Relation.NONE
    # Nodes report at different times, so the first death may only be known later. Deaths after the
    # loss of a node are its consequences.
    may_be_first = verdict.kind in _ENDS and not KINDS[incident.kind].is_unreachable
    return Relation.REFINES if gathering and may_be_first else Relation.CONSEQUENCE


def _relate_to_hang(incident: Incident, verdict: Verdict, gathering: bool) -> Relation:
    if verdict.kind in _ENDS:
        return Relation.CONSEQUENCE  # launchers and people end jobs that hang
    if not _share_ranks(incident, verdict):
        return Relation.NONE
    if verdict.kind in _ROOTS:
        if not verdict.waiting and not KINDS[verdict.kind].blocks_culprits:
            return Relation.NONE  # a separate bug that blocks no rank
    elif verdict.severity is Severity.WARNING:
        return Relation.CONSEQUENCE
    return Relation.REFINES if gathering and incident.kind not in _ROOTS else Relation.CONSEQUENCE


def _has_same_group(incident: Incident, verdict: Verdict) -> bool:
    ours, theirs = incident.group, verdict.group
    if ours is None or theirs is None:
        return False
    return ours.name == theirs.name and ours.ranks == theirs.ranks


def _has_same_position(incident: Incident, verdict: Verdict) -> bool:
    is_same_call = incident.seq is not None and incident.seq == verdict.seq
    if not (is_same_call and _has_same_group(incident, verdict)):
        return False
    # Each pair of ranks in a group counts its point-to-point calls separately: only the two ranks
    # distinguish one pair from another.
    calls = (*incident.verdict.calls, *verdict.calls)
    if all(call_class.call.peer is None for call_class in calls):
        return True
    return _share_culprits(incident, verdict)


def _has_same_location(incident: Incident, verdict: Verdict) -> bool:
    return _has_same_group(incident, verdict) or set(incident.culprits) == set(verdict.culprits)


def _share_culprits(incident: Incident, verdict: Verdict) -> bool:
    return not set(incident.culprits).isdisjoint(verdict.culprits)


def _share_ranks(incident: Incident, verdict: Verdict) -> bool:
    ranks = {*verdict.culprits, *verdict.waiting}
    if incident.kind is verdict.kind and KINDS[verdict.kind].blocks_culprits:
        # A rank that waits for two cycles does not make them one.
        return not (
            ranks.isdisjoint(incident.culprits)
            and set(verdict.culprits).isdisjoint(incident.waiting)
        )
    # `isdisjoint` stops at the first common rank.
    return not (ranks.isdisjoint(incident.culprits) and ranks.isdisjoint(incident.waiting))
