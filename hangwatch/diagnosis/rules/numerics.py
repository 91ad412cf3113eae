"""Where NaN or Inf entered a job: the first call that carried any, and the ranks whose input had
them.

Ranks that received them from that call are not culprits.
"""

from __future__ import annotations

from hangwatch.diagnosis import messages
from hangwatch.diagnosis.context import DiagnosisContext
from hangwatch.model.kinds import KINDS, VerdictKind
from hangwatch.model.verdicts import CallClass, Verdict
from hangwatch.tracking.checks import CheckResults, NonfiniteCall

# A report that comes this much later includes everything that preceded the first one.
_REPORT_MARGIN_S = 0.3
_MAX_REPORT_WAIT_S = 8.0  # for ranks that do not report


def diagnose_nonfinite(context: DiagnosisContext) -> None:
    """One warning for a job."""
    checks = context.attempt.checks
    if checks.unscaled.is_ongoing(context.now) and checks.unscaled.calls:
        first = _find_first_call(list(checks.unscaled.calls.values()))
        _add_nonfinite_verdict(context, first, rounds_affected=0)
    elif checks.persistent.is_ongoing(context.now) and checks.persistent.calls:
        persistent = _find_first_call(list(checks.persistent.calls.values()))
        first = _find_streak_start(checks, persistent)
        _add_nonfinite_verdict(context, first, rounds_affected=persistent.first_report.rounds)


def _find_first_call(calls: list[NonfiniteCall]) -> NonfiniteCall:
    """The earliest call by the clock; within its group the calls' numbers are more reliable."""
    earliest = min(calls, key=lambda call: call.entered_at)
    in_same_stream = [
        call
        for call in calls
        if (call.group.key, call.channel) == (earliest.group.key, earliest.channel)
    ]
    return min(in_same_stream, key=lambda call: call.seq)


def _find_streak_start(checks: CheckResults, nonfinite_call: NonfiniteCall) -> NonfiniteCall:
    """The first call of a streak, from a later call that was reported as part of it."""
    group, first_seq = nonfinite_call.group, nonfinite_call.first_report.first
    key = (group.key, first_seq, nonfinite_call.channel)
    return checks.scaled.calls.get(key, nonfinite_call)


def _add_nonfinite_verdict(
    context: DiagnosisContext, nonfinite_call: NonfiniteCall, rounds_affected: int
) -> None:
    call = nonfinite_call.first_report.call
    culprits = tuple(sorted(nonfinite_call.input_ranks))
    if culprits:
        summary, advice = _describe_input(nonfinite_call, culprits)
    else:
        summary, advice = _describe_output(nonfinite_call)
    if rounds_affected:
        summary += f"; none of the last {rounds_affected} rounds of training was free of them"
        advice += " Loss scaling skips every step for as long as this continues."
    ranks = culprits or tuple(sorted(nonfinite_call.output_ranks))
    waited_s = context.now - nonfinite_call.reported_at
    context.verdicts.append(
        Verdict(
            kind=VerdictKind.NONFINITE,
            severity=KINDS[VerdictKind.NONFINITE].severity,
            culprits=culprits,
            waiting=(),
            group=nonfinite_call.group,
            seq=nonfinite_call.seq,
            differing_fields=("input" if culprits else "output",),
            calls=(CallClass(ranks=ranks, call=call),) if call is not None else (),
            began_at=nonfinite_call.entered_at,
            is_confirmed=waited_s > _MAX_REPORT_WAIT_S
            or _have_all_reported(context, nonfinite_call),
            summary=summary,
            advice=advice,
            site=call.site if call is not None else None,
        )
    )


def _have_all_reported(context: DiagnosisContext, nonfinite_call: NonfiniteCall) -> bool:
    """Whether every live rank has reported since, and with it any earlier NaN or Inf."""
    reported_by = nonfinite_call.reported_at + _REPORT_MARGIN_S
    return all(
        process.reports.last_seen_at >= reported_by
        for process in context.attempt.processes.values()
        if process.is_alive
    )


def _describe_values(nonfinite_call: NonfiniteCall) -> str:
    """``NaN``, ``Inf`` or both."""
    report = nonfinite_call.first_report
    return " and ".join(name for name, count in (("NaN", report.nan), ("Inf", report.inf)) if count)


def _describe_position(nonfinite_call: NonfiniteCall) -> str:
    return messages.describe_position(nonfinite_call.group, nonfinite_call.seq)


def _describe_input(nonfinite_call: NonfiniteCall, culprits: tuple[int, ...]) -> tuple[str, str]:
    """The summary and the advice if ranks are known whose input had such values."""
    op = messages.format_call(nonfinite_call.first_report.call)
    summary = (
        f"{messages.describe_ranks(culprits)} put {_describe_values(nonfinite_call)} into {op}"
        f" ({_describe_position(nonfinite_call)}), the first call that carried any"
    )
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
    return summary, f"{advice} torch.autograd.set_detect_anomaly(True) names the operation."


def _describe_output(nonfinite_call: NonfiniteCall) -> tuple[str, str]:
    """The summary and the advice if only the result had such values."""
    call = nonfinite_call.first_report.call
    dtype = call.signature.dtype if call is not None else None
    summary = (
        f"the result of {messages.format_call(call)} ({_describe_position(nonfinite_call)})"
        f" contains {_describe_values(nonfinite_call)} in {dtype or 'its type'}, although no rank's"
        " input is known to contain any"
    )
    advice = (
        "The sum over the ranks exceeds the range of this type (divide before reducing, or reduce"
        " in a wider type), or the values came from a rank that runs without HANGWATCH_CHECKS."
    )
    return summary, advice
