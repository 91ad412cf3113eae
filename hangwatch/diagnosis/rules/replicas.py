"""Results that must be equal on every rank of a group and are not, found by the checksums of
sampled calls.
"""

from __future__ import annotations

from hangwatch.diagnosis import messages
from hangwatch.diagnosis.context import DiagnosisContext, EvidenceRequest
from hangwatch.model.calls import Call
from hangwatch.model.groups import Group
from hangwatch.model.kinds import KINDS, VerdictKind
from hangwatch.model.operators import OPERATIONS
from hangwatch.model.ranks import format_ranks
from hangwatch.model.verdicts import CallClass, Verdict
from hangwatch.tracking.call_stream import CallWindow
from hangwatch.tracking.checks import ChecksumComparison, ReplicaChecksums

_MAX_REPORT_WAIT_S = 2.0  # for members that have not reported yet
_MAX_CALL_WAIT_S = 3.0  # for the line of the call
_MAX_REQUESTED_RANKS = 4  # of each side
_MAX_SIDES_SHOWN = 4

_Side = tuple[int, ...]  # ranks with the same result


def diagnose_replica_divergence(context: DiagnosisContext) -> None:
    """One warning for each group, for the first call that is known to differ."""
    for checksums in context.attempt.checks.iter_differing():
        members = context.streams_by_group.get(checksums.group.key, {})
        # The calls of two threads have no common order on all ranks, so they cannot be compared.
        if any(stream.concurrent_calls for stream in members.values()):
            continue
        first = checksums.differing[min(checksums.differing)]
        context.verdicts.append(_make_verdict(context, checksums, first))


def _make_verdict(
    context: DiagnosisContext, checksums: ReplicaChecksums, comparison: ChecksumComparison
) -> Verdict:
    group, seq = checksums.group, comparison.seq
    sides = [tuple(sorted(ranks)) for ranks in comparison.ranks_by_checksum.values()]
    sides.sort(key=lambda ranks: (-len(ranks), ranks))
    classes: list[CallClass] = []
    for side in sides:
        call = _find_or_request_call(context, group, side, seq)
        if call is not None:
            classes.append(CallClass(ranks=side, call=call))
    correct = _find_correct_side(group, sides, classes[0].call if classes else None)
    outliers = tuple(sorted(rank for side in sides if side != correct for rank in side))
    outlier_call = next((c.call for c in classes if set(c.ranks) <= set(outliers)), None)
    waited_s = context.now - comparison.differs_at
    have_all_reported = sum(map(len, sides)) == len(group.ranks)
    has_all_calls = len(classes) == len(sides)
    return Verdict(
        kind=VerdictKind.REPLICA_DIVERGENCE,
        severity=KINDS[VerdictKind.REPLICA_DIVERGENCE].severity,
        culprits=outliers,
        waiting=(),
        group=group,
        seq=seq,
        calls=tuple(classes),
        began_at=comparison.differs_at,
        is_confirmed=(have_all_reported or waited_s > _MAX_REPORT_WAIT_S)
        and (has_all_calls or waited_s > _MAX_CALL_WAIT_S),
        summary=(
            f"{_describe_difference(sides, correct, outliers, outlier_call)}"
            f" ({messages.describe_position(group, seq)})"
        ),
        advice=_format_advice(outliers, is_certain=correct is not None),
        site=outlier_call.site if outlier_call is not None else None,
    )


def _find_or_request_call(
    context: DiagnosisContext, group: Group, side: _Side, seq: int
) -> Call | None:
    """The call as one rank of the side made it; requests it from some of them if it is unknown."""
    members = context.streams_by_group.get(group.key, {})
    streams = {rank: members[rank] for rank in side if rank in members}
    for stream in streams.values():
        if seq in stream.calls:
            return stream.calls[seq]
    window = CallWindow(seq, seq)
    not_fetched = [rank for rank, stream in streams.items() if not stream.has_answered(window)]
    for rank in not_fetched[:_MAX_REQUESTED_RANKS]:
        context.requests.append(EvidenceRequest.for_calls(rank, streams[rank], window))
    return None


def _find_correct_side(group: Group, sides: list[_Side], call: Call | None) -> _Side | None:
    """The majority; on a tie, the side with the root of a broadcast; otherwise None."""
    if len(sides[0]) > len(sides[1]):
        return sides[0]
    if call is None:
        return None
    spec = OPERATIONS.get(call.signature.op)
    root = call.signature.root
    if spec is None or not spec.root_is_source or root is None:
        return None
    if not 0 <= root < len(group.ranks):
        return None
    return next((side for side in sides if group.ranks[root] in side), None)


def _describe_difference(
    sides: list[_Side], correct: _Side | None, outliers: tuple[int, ...], call: Call | None
) -> str:
    op = messages.format_call(call)
    if correct is None:
        all_ranks = " and ".join(format_ranks(side) for side in sides[:_MAX_SIDES_SHOWN])
        return f"ranks {all_ranks} got different results from {op}"
    return (
        f"{messages.describe_ranks(outliers)} got a different result from {op} than"
        f" {messages.describe_ranks(correct)}"
    )


def _format_advice(outliers: tuple[int, ...], is_certain: bool) -> str:
    hosts = f"host of {messages.describe_ranks(outliers)}" if is_certain else "hosts"
    return (
        "The bytes of what they received from the same call differ. Possible causes: output tensors"
        " that share memory, memory, a network or a device that corrupts data, or a backend that is"
        " wrong or never wrote this buffer. The replicas are no longer equal: test the"
        f" {hosts}, and continue from an earlier checkpoint."
    )
