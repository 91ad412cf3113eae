"""Where NaN or Inf entered a job: the first call that carried any, and the ranks that put them in.

Whoever got them from that call is not named.
"""

from __future__ import annotations

from hangwatch.diagnosis import messages
from hangwatch.diagnosis.context import DiagnosisContext
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.verdicts import CallClass, Verdict
from hangwatch.tracking.checks import CheckResults, NonfiniteCall

# seconds: what a host tells so much later holds all that came before what was told
_REPORT_MARGIN_S = 0.3
_MAX_REPORT_WAIT_S = 8.0  # seconds at most, for those who are not heard


def diagnose_nonfinite(context: DiagnosisContext) -> None:
    """One warning a job."""
    checks = context.attempt.checks
    if checks.unscaled.is_ongoing(context.now) and checks.unscaled.calls:
        _add_nonfinite_verdict(
            context, _find_first_call(list(checks.unscaled.calls.values())), rounds_affected=0
        )
    elif checks.persistent.is_ongoing(context.now) and checks.persistent.calls:
        found = _find_first_call(list(checks.persistent.calls.values()))
        _add_nonfinite_verdict(
            context, _find_streak_start(checks, found), rounds_affected=found.first_report.rounds
        )


def _find_first_call(calls: list[NonfiniteCall]) -> NonfiniteCall:
    """The earliest by the clock; within its group the numbers of the calls know better."""
    first = min(calls, key=lambda call: call.entered_at)
    return min(
        (c for c in calls if (c.group.key, c.channel) == (first.group.key, first.channel)),
        key=lambda call: call.seq,
    )


def _find_streak_start(checks: CheckResults, nonfinite_call: NonfiniteCall) -> NonfiniteCall:
    """Where the run of calls began of which one has told that it lasts."""
    return checks.scaled.calls.get(
        (nonfinite_call.group.key, nonfinite_call.first_report.first, nonfinite_call.channel),
        nonfinite_call,
    )


def _add_nonfinite_verdict(
    context: DiagnosisContext, nonfinite_call: NonfiniteCall, rounds_affected: int
) -> None:
    told, group = nonfinite_call.first_report, nonfinite_call.group
    culprits = tuple(sorted(nonfinite_call.input_ranks))
    op = messages.format_call(told.call)
    dtype = told.call.signature.dtype if told.call is not None else None
    what = " and ".join(name for name, count in (("NaN", told.nan), ("Inf", told.inf)) if count)
    where = messages.describe_position(group, nonfinite_call.seq)
    if culprits:
        summary = (
            f"{messages.describe_ranks(culprits)} put {what} into {op} ({where}), the first call"
            " that carried any"
        )
        advice = (
            "Look at what it computed before this call: its batch, its loss, its memory; the other"
            " ranks got theirs from it."
            if len(culprits) == 1
            else (
                "Several ranks did so at once: look at what they share, such as the parameters, the"
                " learning rate or the loss."
            )
        )
        advice += " torch.autograd.set_detect_anomaly(True) names the operation."
    else:
        summary = (
            f"the result of {op} ({where}) holds {what} in {dtype or 'its type'}, though no rank"
            " was seen to put any in"
        )
        advice = (
            "The sum over the ranks is larger than this type can hold (divide before reducing, or"
            " reduce in a wider type), or a rank put it in whose job runs without HANGWATCH_CHECKS."
        )
    if rounds_affected:
        summary += f"; for {rounds_affected} rounds of training none has been free of them"
        advice += " Loss scaling leaves out every step for as long as this goes on."
    ranks = culprits or tuple(sorted(nonfinite_call.output_ranks))
    alive = [p for p in context.attempt.processes.values() if p.is_alive]
    heard = all(p.last_seen_at >= nonfinite_call.reported_at + _REPORT_MARGIN_S for p in alive)
    context.verdicts.append(
        Verdict(
            kind=VerdictKind.NONFINITE,
            severity=Severity.WARNING,
            culprits=culprits,
            waiting=(),
            group=group,
            seq=nonfinite_call.seq,
            differing_fields=("input" if culprits else "output",),
            calls=(CallClass(ranks=ranks, call=told.call),) if told.call is not None else (),
            began_at=nonfinite_call.entered_at,
            is_confirmed=heard or context.now - nonfinite_call.reported_at > _MAX_REPORT_WAIT_S,
            summary=summary,
            advice=advice,
            site=told.call.site if told.call is not None else None,
        )
    )
