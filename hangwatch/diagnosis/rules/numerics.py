"""Where NaN or Inf entered a job: the first call that carried any, and the ranks that put them in.

Whoever got them from that call is not named.
"""

from __future__ import annotations

from hangwatch.diagnosis import messages
from hangwatch.diagnosis.context import Case
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.verdicts import CallClass, Verdict
from hangwatch.tracking.checks import CheckResults, NonfiniteCall

_MARGIN = 0.3  # seconds: what a host tells so much later holds all that came before what was told
_WAIT = 8.0  # seconds at most, for those who are not heard


def nonfinite(case: Case) -> None:
    """One warning a job."""
    checks = case.attempt.checks
    if checks.unscaled.is_ongoing(case.now) and checks.unscaled.calls:
        _tell(case, _first(list(checks.unscaled.calls.values())), lasting=0)
    elif checks.persistent.is_ongoing(case.now) and checks.persistent.calls:
        found = _first(list(checks.persistent.calls.values()))
        _tell(case, _origin(checks, found), lasting=found.first_report.rounds)


def _first(calls: list[NonfiniteCall]) -> NonfiniteCall:
    """The earliest by the clock; within its group the numbers of the calls know better."""
    first = min(calls, key=lambda call: call.entered_at)
    return min(
        (c for c in calls if (c.group.key, c.channel) == (first.group.key, first.channel)),
        key=lambda call: call.seq,
    )


def _origin(checks: CheckResults, found: NonfiniteCall) -> NonfiniteCall:
    """Where the run of calls began of which one has told that it lasts."""
    return checks.scaled.calls.get(
        (found.group.key, found.first_report.first, found.channel), found
    )


def _tell(case: Case, found: NonfiniteCall, lasting: int) -> None:
    told, group = found.first_report, found.group
    culprits = tuple(sorted(found.input_ranks))
    op = messages.called_at(told.call)
    dtype = told.call.signature.dtype if told.call is not None else None
    what = " and ".join(name for name, count in (("NaN", told.nan), ("Inf", told.inf)) if count)
    where = messages.where(group, found.seq)
    if culprits:
        summary = (
            f"{messages.those(culprits)} put {what} into {op} ({where}), the first call that"
            " carried any"
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
    if lasting:
        summary += f"; for {lasting} rounds of training none has been free of them"
        advice += " Loss scaling leaves out every step for as long as this goes on."
    ranks = culprits or tuple(sorted(found.output_ranks))
    alive = [p for p in case.attempt.processes.values() if p.is_alive]
    heard = all(p.last_seen_at >= found.reported_at + _MARGIN for p in alive)
    case.verdicts.append(
        Verdict(
            kind=VerdictKind.NONFINITE,
            severity=Severity.WARNING,
            culprits=culprits,
            waiting=(),
            group=group,
            seq=found.seq,
            differing_fields=("input" if culprits else "output",),
            calls=(CallClass(ranks=ranks, call=told.call),) if told.call is not None else (),
            began_at=found.entered_at,
            is_confirmed=heard or case.now - found.reported_at > _WAIT,
            summary=summary,
            advice=advice,
            site=told.call.site if told.call is not None else None,
        )
    )
