"""Results that must be equal on every rank of a group, and are not: found by the checksums of
sampled calls.
"""

from __future__ import annotations

from hangwatch.diagnosis import messages
from hangwatch.diagnosis.context import Case, Request
from hangwatch.model.calls import Call
from hangwatch.model.groups import Group
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.ranks import format_ranks
from hangwatch.model.verdicts import CallClass, Verdict
from hangwatch.tracking.checks import ChecksumComparison, ReplicaChecksums

_WAIT = 2.0  # seconds for members who have not told yet
_CALLS_WAIT = 3.0  # seconds for the line of the call
_ASKED = 4  # ranks of each side


def replica_divergence(case: Case) -> None:
    """One warning a group, for the first call of which it is known."""
    for held in case.attempt.checks.iter_differing():
        members = case.places.get(held.group.key, {})
        if not any(
            s.concurrent_calls for s in members.values()
        ):  # which of two threads' calls came first is another on every rank
            case.verdicts.append(_verdict(case, held, held.differing[min(held.differing)]))


def _verdict(case: Case, held: ReplicaChecksums, found: ChecksumComparison) -> Verdict:
    group, seq = held.group, found.seq
    sides = sorted(
        (tuple(sorted(ranks)) for ranks in found.ranks_by_checksum.values()),
        key=lambda ranks: (-len(ranks), ranks),
    )
    classes = [
        CallClass(ranks=side, call=call)
        for side in sides
        if (call := _call(case, group, side, seq)) is not None
    ]
    odd, certain = _odd(group, sides, classes[0].call if classes else None)
    waited = case.now - found.differs_at
    complete = sum(map(len, sides)) == len(group.ranks)
    return Verdict(
        kind=VerdictKind.REPLICA_DIVERGENCE,
        severity=Severity.WARNING,
        culprits=odd,
        waiting=(),
        group=group,
        seq=seq,
        calls=tuple(classes),
        began_at=found.differs_at,
        is_confirmed=(complete or waited > _WAIT)
        and (len(classes) == len(sides) or waited > _CALLS_WAIT),
        summary=_summary(odd, certain, sides, classes, group, seq),
        advice=(
            "What they got from one and the same call differs in its bytes: output tensors that"
            " share memory, memory, a network or a device that corrupts data, a wrong backend, or"
            " one that never wrote this buffer. The replicas are no longer equal: test the"
            f" host{' of ' + messages.those(odd) if certain else 's'}, and go on from a checkpoint"
            " from before."
        ),
        site=next((c.call.site for c in classes if set(c.ranks) <= set(odd)), None),
    )


def _call(case: Case, group: Group, side: tuple[int, ...], seq: int) -> Call | None:
    """As one of them made it; asks for it where that is not known."""
    members = case.places.get(group.key, {})
    told = [members[rank] for rank in side if rank in members]
    call = next((s.calls[seq] for s in told if seq in s.calls), None)
    if call is None:
        asked = [rank for rank in side if rank in members and members[rank].fetched_to < seq][
            :_ASKED
        ]
        case.requests += [Request(rank=rank, uid=members[rank].uid, from_seq=seq) for rank in asked]
    return call


def _odd(
    group: Group, sides: list[tuple[int, ...]], call: Call | None
) -> tuple[tuple[int, ...], bool]:
    """All but the majority; on a tie all but those who have what the root of a broadcast has, else
    all. And whether that is certain.
    """
    right: tuple[int, ...] | None = sides[0] if len(sides[0]) > len(sides[1]) else None
    root = call.signature.root if call is not None and call.signature.op == "broadcast" else None
    if right is None and root is not None and 0 <= root < len(group.ranks):
        right = next((side for side in sides if group.ranks[root] in side), None)
    return (
        tuple(sorted(rank for side in sides if side != right for rank in side)),
        right is not None,
    )


def _summary(
    odd: tuple[int, ...],
    certain: bool,
    sides: list[tuple[int, ...]],
    classes: list[CallClass],
    group: Group,
    seq: int,
) -> str:
    op = messages.called_at(next((c.call for c in classes if set(c.ranks) <= set(odd)), None))
    if certain:
        others = tuple(sorted({rank for side in sides for rank in side} - set(odd)))
        return (
            f"{messages.those(odd)} got another result from {op} than {messages.those(others)}"
            f" ({messages.where(group, seq)})"
        )
    return (
        f"ranks {' and '.join(format_ranks(side) for side in sides[:4])} got different results from"
        f" {op} ({messages.where(group, seq)})"
    )
