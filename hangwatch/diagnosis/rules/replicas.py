"""Results that must be equal on every rank of a group, and are not: found by the checksums of
sampled calls.
"""

from __future__ import annotations

from hangwatch.diagnosis import messages
from hangwatch.diagnosis.context import DiagnosisContext, EvidenceRequest
from hangwatch.model.calls import Call
from hangwatch.model.groups import Group
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.operators import OPERATIONS
from hangwatch.model.ranks import format_ranks
from hangwatch.model.verdicts import CallClass, Verdict
from hangwatch.tracking.checks import ChecksumComparison, ReplicaChecksums

_MAX_REPORT_WAIT_S = 2.0  # seconds for members who have not told yet
_MAX_CALL_WAIT_S = 3.0  # seconds for the line of the call
_MAX_REQUESTED_RANKS = 4  # ranks of each side


def diagnose_replica_divergence(context: DiagnosisContext) -> None:
    """One warning a group, for the first call of which it is known."""
    for held in context.attempt.checks.iter_differing():
        members = context.streams_by_group.get(held.group.key, {})
        if not any(
            s.concurrent_calls for s in members.values()
        ):  # which of two threads' calls came first is another on every rank
            context.verdicts.append(
                _make_verdict(context, held, held.differing[min(held.differing)])
            )


def _make_verdict(
    context: DiagnosisContext, checksums: ReplicaChecksums, comparison: ChecksumComparison
) -> Verdict:
    group, seq = checksums.group, comparison.seq
    sides = sorted(
        (tuple(sorted(ranks)) for ranks in comparison.ranks_by_checksum.values()),
        key=lambda ranks: (-len(ranks), ranks),
    )
    classes = [
        CallClass(ranks=side, call=call)
        for side in sides
        if (call := _find_or_request_call(context, group, side, seq)) is not None
    ]
    odd, certain = _find_outliers(group, sides, classes[0].call if classes else None)
    waited = context.now - comparison.differs_at
    complete = sum(map(len, sides)) == len(group.ranks)
    return Verdict(
        kind=VerdictKind.REPLICA_DIVERGENCE,
        severity=Severity.WARNING,
        culprits=odd,
        waiting=(),
        group=group,
        seq=seq,
        calls=tuple(classes),
        began_at=comparison.differs_at,
        is_confirmed=(complete or waited > _MAX_REPORT_WAIT_S)
        and (len(classes) == len(sides) or waited > _MAX_CALL_WAIT_S),
        summary=_format_summary(odd, certain, sides, classes, group, seq),
        advice=(
            "What they got from one and the same call differs in its bytes: output tensors that"
            " share memory, memory, a network or a device that corrupts data, a wrong backend, or"
            " one that never wrote this buffer. The replicas are no longer equal: test the"
            f" host{' of ' + messages.describe_ranks(odd) if certain else 's'}, and go on from a"
            " checkpoint from before."
        ),
        site=next((c.call.site for c in classes if set(c.ranks) <= set(odd)), None),
    )


def _find_or_request_call(
    context: DiagnosisContext, group: Group, side: tuple[int, ...], seq: int
) -> Call | None:
    """As one of them made it; asks for it where that is not known."""
    members = context.streams_by_group.get(group.key, {})
    told = [members[rank] for rank in side if rank in members]
    call = next((s.calls[seq] for s in told if seq in s.calls), None)
    if call is None:
        asked = [rank for rank in side if rank in members and members[rank].fetched_to < seq][
            :_MAX_REQUESTED_RANKS
        ]
        context.requests += [
            EvidenceRequest(rank=rank, stream_uid=members[rank].uid, from_seq=seq) for rank in asked
        ]
    return call


def _find_outliers(
    group: Group, sides: list[tuple[int, ...]], call: Call | None
) -> tuple[tuple[int, ...], bool]:
    """All but the majority; on a tie all but those who have what the root of a broadcast has, else
    all. And whether that is certain.
    """
    right: tuple[int, ...] | None = sides[0] if len(sides[0]) > len(sides[1]) else None
    root = None
    if call is not None and (spec := OPERATIONS.get(call.signature.op)) is not None:
        root = call.signature.root if spec.root_is_source else None
    if right is None and root is not None and 0 <= root < len(group.ranks):
        right = next((side for side in sides if group.ranks[root] in side), None)
    return (
        tuple(sorted(rank for side in sides if side != right for rank in side)),
        right is not None,
    )


def _format_summary(
    outliers: tuple[int, ...],
    is_certain: bool,
    sides: list[tuple[int, ...]],
    classes: list[CallClass],
    group: Group,
    seq: int,
) -> str:
    op = messages.format_call(
        next((c.call for c in classes if set(c.ranks) <= set(outliers)), None)
    )
    if is_certain:
        others = tuple(sorted({rank for side in sides for rank in side} - set(outliers)))
        return (
            f"{messages.describe_ranks(outliers)} got another result from {op} than"
            f" {messages.describe_ranks(others)} ({messages.describe_position(group, seq)})"
        )
    return (
        f"ranks {' and '.join(format_ranks(side) for side in sides[:4])} got different results from"
        f" {op} ({messages.describe_position(group, seq)})"
    )
