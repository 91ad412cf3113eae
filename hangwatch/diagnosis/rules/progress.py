"""Calls that all whom they need have made, and that do not finish: what lies below the ranks is to
blame.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from hangwatch.diagnosis import messages
from hangwatch.diagnosis.context import Case, ask_stacks, call_of, known_until, op_of, suspicion
from hangwatch.model.calls import StreamKind
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.verdicts import Verdict
from hangwatch.tracking.call_stream import CallStream, GroupState


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stuck:
    """The ranks ``inside`` a call, the newest of ``sequence``, which the ``members`` have made;
    ``waiting`` are these and their waiters.
    """

    sequence: CallStream
    inside: list[int]
    members: Iterable[int]
    waiting: list[int]
    since: float
    told: str


def no_progress(case: Case) -> None:
    """One verdict for all of them: they have the network in common. Places of meeting that differ
    are another matter.
    """
    limit = suspicion(case.limits)
    found = [s for s in (*_collectives(case), *_channels(case)) if _age(case, s) >= limit]
    for stuck in found:
        ask_stacks(case, (), set(stuck.waiting), stuck.since)
    # Some backends never tell that an asynchronous call is complete.
    found = [s for s in found if not case.graph.doubtful.issuperset(s.inside)]
    for stuck in [s for s in found if s.sequence.kind is StreamKind.SETUP]:
        case.verdicts.append(_elsewhere(case, _verdict(case, [stuck])))
        found.remove(stuck)
    if found:
        case.verdicts.append(
            _verdict(case, sorted(found, key=lambda s: (-len(s.waiting), s.waiting)))
        )


def _age(case: Case, stuck: _Stuck) -> float:
    """For how long it is known to be so: what became of those who wait for it does not matter."""
    return min(known_until(case, r) for r in stuck.members) - stuck.since


def _collectives(case: Case) -> Iterator[_Stuck]:
    """Every member made the same call and none finishes; or some have, and wait elsewhere for those
    who have not.
    """
    blocked = case.graph.reaching(case.graph.stuck).union(case.graph.stuck) - case.explained
    by_team: dict[int, tuple[GroupState, list[int]]] = {}
    for rank, sequence in case.graph.stuck.items():
        if rank not in case.explained and sequence.is_pending and sequence.group_state is not None:
            by_team.setdefault(id(sequence.group_state), (sequence.group_state, []))[1].append(rank)
    for team, inside in by_team.values():
        key, members = team.key, team.members
        if not blocked.issuperset(key[2]):
            continue
        sequence = members[inside[0]]
        unfinished = (
            "none finishes"
            if len(inside) == len(key[2])
            else f"{messages.those(tuple(sorted(inside)))} cannot finish it"
        )
        yield _Stuck(
            sequence=sequence,
            inside=inside,
            members=key[2],
            waiting=sorted({*key[2], *case.graph.reaching(inside)} - case.explained),
            since=max(members[r].entered_at for r in key[2]),
            told=f"all {len(key[2])} ranks made the same call and {unfinished}: {op_of(sequence)}",
        )


def _channels(case: Case) -> Iterator[_Stuck]:
    """A rank waits for what its peer has done."""
    for rank, sequence in case.graph.stuck.items():
        peer = sequence.peer
        if peer is None or rank in case.explained or not sequence.is_pending:
            continue
        done = "sent" if sequence.kind is StreamKind.RECV else "called recv"
        yield _Stuck(
            sequence=sequence,
            inside=[rank],
            members=[rank],
            waiting=sorted({rank, *case.graph.reaching([rank])} - case.explained),
            since=max(
                sequence.entered_at, case.attempt.processes[peer].last_advanced_at
            ),  # it may have done so only just now
            told=f"rank {rank} does not finish {op_of(sequence)}, although rank {peer} has {done}",
        )


def _verdict(case: Case, found: list[_Stuck]) -> Verdict:
    first, sequence = found[0], found[0].sequence
    more = (
        f", and {len(found) - 1} more such call{'s' if len(found) > 2 else ''}"
        if len(found) > 1
        else ""
    )
    waiting = sorted({r for s in found for r in s.waiting})
    case.explained |= set(waiting)
    return Verdict(
        kind=VerdictKind.NO_PROGRESS,
        severity=Severity.ALERT,
        culprits=(),
        waiting=tuple(waiting),
        group=sequence.group,
        seq=sequence.entered,
        calls=call_of(sequence, first.inside[0]),
        began_at=min(s.since for s in found),
        is_confirmed=max(_age(case, s) for s in found) >= case.limits.stall_after_s,
        summary=f"{first.told} ({messages.where(sequence.group, sequence.entered)}){more}",
        advice=messages.BELOW_ADVICE,
    )


def _elsewhere(case: Case, verdict: Verdict) -> Verdict:
    """Ranks that all wait for one another in init_process_group may be looking for one another in
    different places.
    """
    places: dict[str, list[int]] = {}
    for rank in verdict.waiting:
        places.setdefault(case.attempt.processes[rank].identity.master, []).append(rank)
    (most, there), *others = sorted(places.items(), key=lambda item: -len(item[1]))
    if not others:
        return verdict
    tied = len(others[0][1]) == len(there)
    odd = tuple(sorted(r for _, ranks in others for r in ranks)) if not tied else verdict.waiting
    return replace(
        verdict,
        kind=VerdictKind.STARTUP_STALL,
        culprits=odd,
        waiting=tuple(r for r in verdict.waiting if r not in odd),
        summary="; ".join(
            f"{messages.those(tuple(ranks))} look for the others at {place}"
            for place, ranks in (*others, (most, there))
        ),
        advice="MASTER_ADDR and MASTER_PORT must be the same on every rank.",
    )
