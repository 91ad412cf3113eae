"""Wrong values: the call by which NaN or Inf entered a job, and results that must be equal on every rank
of a group and are not. The opt-in checks of the recorder find them.
"""

from __future__ import annotations

from collections.abc import Collection

from hangwatch.model.calls import Call
from hangwatch.model.groups import Group
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.limits import (
    MAX_EVIDENCE_WAIT_S,
    MAX_NONFINITE_WAIT_S,
    MAX_REPLICA_WAIT_S,
    REPORT_MARGIN_S,
)
from hangwatch.model.operators import OPERATIONS
from hangwatch.model.ranks import Ranks, format_ranks
from hangwatch.model.verdicts import CallClass, Verdict
from hangwatch.tracking.call_stream import CallWindow
from hangwatch.tracking.checks import ChecksumComparison, NonfiniteCall

from ..context import DiagnosisContext
from ..messages import Messages, describe_position, describe_ranks, format_call

_MAX_REQUESTED_RANKS = 4  # ranks on each side whose call is requested
_MAX_SIDES_SHOWN = 4


def diagnose_nonfinite(context: DiagnosisContext) -> None:
    """One warning for a job: on the first call that carried NaN or Inf, and the ranks whose input had
    them. Ranks that received them from that call are not culprits.
    """
    checks = context.attempt.checks
    rounds_affected = 0
    if checks.unscaled.is_ongoing(context.now) and checks.unscaled.calls:
        first = _find_first_call(checks.unscaled.calls.values())
    elif checks.persistent.is_ongoing(context.now) and checks.persistent.calls:
        persistent = _find_first_call(checks.persistent.calls.values())
        # The call was reported as part of a streak, whose first call counts.
        start = (persistent.group.key, persistent.first_report.first, persistent.channel)
        first = checks.scaled.calls.get(start, persistent)
        rounds_affected = persistent.first_report.rounds
    else:
        return
    call = first.first_report.call
    culprits = tuple(sorted(first.input_ranks))
    ranks = culprits or tuple(sorted(first.output_ranks))
    # A live rank that has reported since then has reported any earlier NaN or Inf as well.
    reported_by = first.reported_at + REPORT_MARGIN_S
    is_confirmed = context.now - first.reported_at > MAX_NONFINITE_WAIT_S or all(
        process.reports.last_seen_at >= reported_by
        for process in context.processes.values()
        if process.is_alive
    )
    summary, advice = _describe_nonfinite(first, culprits)
    if rounds_affected:
        summary += f"; none of the last {rounds_affected} rounds of training was free of them"
        advice += " Loss scaling skips every step for as long as this continues."
    verdict = Verdict(
        kind=VerdictKind.NONFINITE,
        culprits=culprits,
        waiting=(),
        group=first.group,
        seq=first.seq,
        differing_fields=("input" if culprits else "output",),
        calls=(CallClass(ranks=ranks, call=call),) if call is not None else (),
        began_at=first.entered_at,
        is_confirmed=is_confirmed,
        summary=summary,
        advice=advice,
        site=call.site if call is not None else None,
    )
    context.accuse(verdict, explains=None)


def _find_first_call(calls: Collection[NonfiniteCall]) -> NonfiniteCall:
    """The earliest call by the clock; within its group the calls' numbers are more reliable."""
    earliest = min(calls, key=lambda call: call.entered_at)
    position = (earliest.group.key, earliest.channel)
    in_same_stream = [call for call in calls if (call.group.key, call.channel) == position]
    return min(in_same_stream, key=lambda call: call.seq)


def _describe_nonfinite(nonfinite_call: NonfiniteCall, culprits: Ranks) -> Messages:
    """The summary and the advice; ``culprits`` are the ranks whose input had such values, if any is known."""
    report = nonfinite_call.first_report
    call = report.call
    op = format_call(call)
    counts = {"NaN": report.nan, "Inf": report.inf}
    values = " and ".join(name for name in counts if counts[name])
    position = describe_position(nonfinite_call.group, nonfinite_call.seq)
    if not culprits:
        dtype = call.signature.dtype if call is not None else None
        summary = (
            f"the result of {op} ({position}) contains {values} in {dtype or 'its type'}, although no"
            " rank's input is known to contain any"
        )
        advice = (
            "The sum over the ranks exceeds the range of this type (divide before reducing, or reduce"
            " in a wider type), or the values came from a rank that runs without HANGWATCH_CHECKS."
        )
        return summary, advice
    if len(culprits) == 1:
        advice = (
            "Check what it computed before this call: its batch, its loss and its memory. The other"
            " ranks received theirs from this call."
        )
    else:
        advice = (
            "Several ranks did so at this position: check what they share, such as the parameters,"
            " the learning rate or the loss."
        )
    summary = f"{describe_ranks(culprits)} put {values} into {op} ({position}), the first call that carried any"
    return summary, f"{advice} torch.autograd.set_detect_anomaly(True) names the operation."


def diagnose_replica_divergence(context: DiagnosisContext) -> None:
    """One warning for each group: on the first sampled call whose checksums are known to differ."""
    for checksums in context.attempt.checks.iter_differing():
        members = context.get_members(checksums.group)
        # The calls of two threads have no common order on all ranks, so they cannot be compared.
        if any(stream.concurrent_calls for stream in members.values()):
            continue
        first = checksums.differing[min(checksums.differing)]
        context.accuse(_make_replica_verdict(context, checksums.group, first), explains=None)


def _make_replica_verdict(
    context: DiagnosisContext, group: Group, comparison: ChecksumComparison
) -> Verdict:
    seq = comparison.seq
    sides = [tuple(sorted(ranks)) for ranks in comparison.ranks_by_checksum.values()]
    sides.sort(key=lambda ranks: (-len(ranks), ranks))
    classes = []
    for side in sides:
        call = _find_or_request_call(context, group, side, seq)
        if call is not None:
            classes.append(CallClass(ranks=side, call=call))
    correct = _find_correct_side(group, sides, classes[0].call if classes else None)
    outliers = tuple(sorted(rank for side in sides if side != correct for rank in side))
    outlier_call = next((c.call for c in classes if set(c.ranks) <= set(outliers)), None)
    waited_s = context.now - comparison.differs_at
    is_complete = sum(map(len, sides)) == len(group.ranks) or waited_s > MAX_REPLICA_WAIT_S
    has_evidence = len(classes) == len(sides) or waited_s > MAX_EVIDENCE_WAIT_S
    op = format_call(outlier_call)
    if correct is None:
        all_ranks = " and ".join(format_ranks(side) for side in sides[:_MAX_SIDES_SHOWN])
        difference = f"ranks {all_ranks} got different results from {op}"
        hosts = "hosts"
    else:
        subject = describe_ranks(outliers)
        difference = f"{subject} got a different result from {op} than {describe_ranks(correct)}"
        hosts = f"host of {subject}"
    return Verdict(
        kind=VerdictKind.REPLICA_DIVERGENCE,
        culprits=outliers,
        waiting=(),
        group=group,
        seq=seq,
        calls=tuple(classes),
        began_at=comparison.differs_at,
        is_confirmed=is_complete and has_evidence,
        summary=f"{difference} ({describe_position(group, seq)})",
        advice=(
            "The bytes of what they received from the same call differ. Possible causes: output"
            " tensors that share memory, memory, a network or a device that corrupts data, or a"
            " backend that is wrong or never wrote this buffer. The replicas are no longer equal:"
            f" test the {hosts}, and continue from an earlier checkpoint."
        ),
        site=outlier_call.site if outlier_call is not None else None,
    )


def _find_or_request_call(
    context: DiagnosisContext, group: Group, side: Ranks, seq: int
) -> Call | None:
    """The call as one rank of the side made it; requests it from some of them if it is unknown."""
    members = context.get_members(group)
    streams = {rank: members[rank] for rank in side if rank in members}
    for stream in streams.values():
        if seq in stream.calls:
            return stream.calls[seq]
    window = CallWindow(seq, seq)
    not_fetched = [rank for rank, stream in streams.items() if not stream.has_answered(window)]
    for rank in not_fetched[:_MAX_REQUESTED_RANKS]:
        context.request_calls(rank, streams[rank], window)
    return None


def _find_correct_side(group: Group, sides: list[Ranks], call: Call | None) -> Ranks | None:
    """The majority; on a tie, the side with the root of a broadcast, or None."""
    if len(sides[0]) > len(sides[1]):
        return sides[0]
    if call is None:
        return None
    spec = OPERATIONS.get(call.signature.op)
    root = call.signature.root
    if spec is None or not spec.root_is_source:
        return None
    if root is None or not 0 <= root < len(group.ranks):
        return None
    return next((side for side in sides if group.ranks[root] in side), None)
