"""Calls that all whom they need have made, and that do not finish: what lies below the ranks is to
blame.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from hangwatch.diagnosis import messages
from hangwatch.diagnosis.context import (
    DiagnosisContext,
    get_newest_call,
    get_op_name,
    get_state_known_until,
    get_suspicion_delay_s,
    request_stacks,
)
from hangwatch.model.calls import StreamKind
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.verdicts import Verdict
from hangwatch.tracking.call_stream import CallStream, GroupState


@dataclass(frozen=True, slots=True, kw_only=True)
class _StuckCall:
    """The ranks ``inside`` a call, the newest of ``sequence``, which the ``members`` have made;
    ``waiting`` are these and their waiters.
    """

    stream: CallStream
    inside: list[int]
    members: Iterable[int]
    waiting: list[int]
    began_at: float
    description: str


def diagnose_no_progress(context: DiagnosisContext) -> None:
    """One verdict for all of them: they have the network in common. Places of meeting that differ
    are another matter.
    """
    limit = get_suspicion_delay_s(context.limits)
    found = [
        s
        for s in (*_find_stuck_collectives(context), *_find_stuck_channels(context))
        if _get_stuck_age_s(context, s) >= limit
    ]
    for stuck in found:
        request_stacks(context, (), set(stuck.waiting), stuck.began_at)
    # Some backends never tell that an asynchronous call is complete.
    found = [s for s in found if not context.graph.uncertain_ranks.issuperset(s.inside)]
    for stuck in [s for s in found if s.stream.kind is StreamKind.SETUP]:
        context.verdicts.append(_blame_master_address(context, _make_verdict(context, [stuck])))
        found.remove(stuck)
    if found:
        context.verdicts.append(
            _make_verdict(context, sorted(found, key=lambda s: (-len(s.waiting), s.waiting)))
        )


def _get_stuck_age_s(context: DiagnosisContext, stuck: _StuckCall) -> float:
    """For how long it is known to be so: what became of those who wait for it does not matter."""
    return min(get_state_known_until(context, r) for r in stuck.members) - stuck.began_at


def _find_stuck_collectives(context: DiagnosisContext) -> Iterator[_StuckCall]:
    """Every member made the same call and none finishes; or some have, and wait elsewhere for those
    who have not.
    """
    blocked = (
        context.graph.find_waiters_of(context.graph.stuck_streams).union(
            context.graph.stuck_streams
        )
        - context.explained_ranks
    )
    by_team: dict[int, tuple[GroupState, list[int]]] = {}
    for rank, sequence in context.graph.stuck_streams.items():
        if (
            rank not in context.explained_ranks
            and sequence.is_pending
            and sequence.group_state is not None
        ):
            by_team.setdefault(id(sequence.group_state), (sequence.group_state, []))[1].append(rank)
    for team, inside in by_team.values():
        key, members = team.key, team.members
        if not blocked.issuperset(key[2]):
            continue
        sequence = members[inside[0]]
        unfinished = (
            "none finishes"
            if len(inside) == len(key[2])
            else f"{messages.describe_ranks(tuple(sorted(inside)))} cannot finish it"
        )
        yield _StuckCall(
            stream=sequence,
            inside=inside,
            members=key[2],
            waiting=sorted(
                {*key[2], *context.graph.find_waiters_of(inside)} - context.explained_ranks
            ),
            began_at=max(members[r].entered_at for r in key[2]),
            description=(
                f"all {len(key[2])} ranks made the same call and {unfinished}:"
                f" {get_op_name(sequence)}"
            ),
        )


def _find_stuck_channels(context: DiagnosisContext) -> Iterator[_StuckCall]:
    """A rank waits for what its peer has done."""
    for rank, sequence in context.graph.stuck_streams.items():
        peer = sequence.peer
        if peer is None or rank in context.explained_ranks or not sequence.is_pending:
            continue
        yield _StuckCall(
            stream=sequence,
            inside=[rank],
            members=[rank],
            waiting=sorted(
                {rank, *context.graph.find_waiters_of([rank])} - context.explained_ranks
            ),
            began_at=max(
                sequence.entered_at, context.attempt.processes[peer].last_advanced_at
            ),  # it may have done so only just now
            description=messages.describe_unfinished_message(
                rank,
                get_op_name(sequence),
                f"rank {peer}",
                is_receive=sequence.kind is StreamKind.RECV,
            ),
        )


def _make_verdict(context: DiagnosisContext, found: list[_StuckCall]) -> Verdict:
    first, sequence = found[0], found[0].stream
    more = messages.format_more_calls(len(found) - 1)
    waiting = sorted({r for s in found for r in s.waiting})
    context.explained_ranks |= set(waiting)
    return Verdict(
        kind=VerdictKind.NO_PROGRESS,
        severity=Severity.ALERT,
        culprits=(),
        waiting=tuple(waiting),
        group=sequence.group,
        seq=sequence.entered,
        calls=get_newest_call(sequence, first.inside[0]),
        began_at=min(s.began_at for s in found),
        is_confirmed=max(_get_stuck_age_s(context, s) for s in found)
        >= context.limits.stall_after_s,
        summary=(
            f"{first.description}"
            f" ({messages.describe_position(sequence.group, sequence.entered)}){more}"
        ),
        advice=messages.LOWER_LAYERS_ADVICE,
    )


def _blame_master_address(context: DiagnosisContext, verdict: Verdict) -> Verdict:
    """Ranks that all wait for one another in init_process_group may be looking for one another in
    different places.
    """
    places: dict[str, list[int]] = {}
    for rank in verdict.waiting:
        places.setdefault(context.attempt.processes[rank].identity.master, []).append(rank)
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
            f"{messages.describe_ranks(tuple(ranks))} look for the others at {place}"
            for place, ranks in (*others, (most, there))
        ),
        advice="MASTER_ADDR and MASTER_PORT must be the same on every rank.",
    )
