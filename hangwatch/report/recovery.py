"""The measures of --on-hang abort for an incident, as text. Pure; mostly from the API's JSON
documents, which may lack fields.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Sequence

from .text import Document, abbreviate_list, clean_member, clean_text, get_parts, name_ranks

_MAX_PIDS_SHOWN = 4
# What became of ranks, by the result in their documents. {detail} is the signal that ended them, or
# the reason for which they could not be ended.
_OUTCOMES = {
    "ended": "{names} {was} ended by {detail}",
    "gone": "{names} had ended before",
    "left": "{names} {was} not ended, as the job moved or did not report",
    "failed": "{names} could not be ended: {detail}",
}


def explain_refusal(ranks: Iterable[int], on_hang: str) -> str:
    """Why no rank is ended if ``ranks`` have this value of HANGWATCH_ON_HANG, with the remedy."""
    state = f"HANGWATCH_ON_HANG={on_hang}" if on_hang else "no HANGWATCH_ON_HANG"
    return (
        f"{state} in the environment of {name_ranks(ranks)} does not allow it: start the job with"
        " HANGWATCH_ON_HANG=abort"
    )


def explain_limit(job: str, count: int) -> str:
    """Why no rank of a job is ended after ``count`` incidents with ended ranks, with the remedy."""
    times = "once" if count == 1 else f"{count} times"
    return (
        f"ranks of job {job} were ended {times} since its last success, as often as --abort-limit"
        " allows: increase the limit, or give each run its own name with HANGWATCH_JOB"
    )


def explain_silence(seconds: float) -> str:
    """Why the result of an order is not known."""
    return f"its node agent has not answered for {seconds:g} s"


def format_recovery(document: Document) -> str:
    """A sentence on the state of the recovery; empty if no rank was ever to be ended."""
    recovery = document.get("recovery") or {}
    state = recovery.get("state")
    aborts = get_parts(recovery, "aborts")
    if state == "withheld":
        return f"No rank is ended: {clean_member(recovery, 'why')}."
    number = clean_member(recovery, "number")
    count = f"{number} of at most {clean_member(recovery, 'limit')} such incidents of this job"
    results = [abort.get("result") for abort in aborts]
    if state == "done" or "ended" in results or "failed" in results:
        outcomes = "; ".join(format_outcomes(aborts))
        return f"{outcomes[:1].upper()}{outcomes[1:]} ({count})."
    if state not in ("planned", "announced", "ordered"):
        return ""
    if document.get("status") != "open":
        reason = "made progress" if document.get("resolution") == "progress" else "ended"
        return f"No rank was ended: the job {reason} before."
    ranks = get_parts(recovery, "ranks")
    be = "is" if len(ranks) == 1 else "are"
    if state == "planned":
        return (
            f"Unless the job moves, {name_ranks(ranks)} {be} to be ended at"
            f" {format_clock(recovery.get('due_at'))} at the earliest ({count})."
        )
    return f"{name_ranks(ranks).capitalize()} {be} being ended ({count})."


def format_outcomes(aborts: Sequence[Document]) -> Iterator[str]:
    """The outcomes for the ranks, one sentence for all ranks with the same outcome."""
    ranks_by_outcome: dict[tuple[str, str], list[int]] = {}
    for abort in aborts:
        detail = clean_member(abort, "error", "")
        if not detail and abort.get("signal") is not None:
            detail = get_signal_name(abort["signal"])
        outcome = (str(abort.get("result")), detail)
        ranks_by_outcome.setdefault(outcome, []).append(abort.get("rank", -1))
    for (result, detail), ranks in ranks_by_outcome.items():
        template = _OUTCOMES.get(result, "{names} {be} being ended")
        be, was = ("is", "was") if len(ranks) == 1 else ("are", "were")
        yield template.format(names=name_ranks(ranks), be=be, was=was, detail=detail)


def iter_recovery_events(document: Document) -> Iterator[tuple[str, str]]:
    """The events of a recovery, for a history: (RFC 3339 time, text)."""
    recovery = document.get("recovery") or {}
    names = name_ranks(recovery.get("ranks"))
    if recovery.get("planned_at"):
        if recovery.get("state") == "withheld":
            reason = clean_member(recovery, "why")
            text = f"hangwatch does not end any rank: {reason}"
        else:
            due = format_clock(recovery.get("due_at"))
            text = f"hangwatch was to end {names}, unless the job moved by {due}"
        yield str(recovery["planned_at"]), text
    if recovery.get("announced_at"):
        yield str(recovery["announced_at"]), f"hangwatch announced that it ends {names}"
    aborts_by_time: dict[str, list[Document]] = {}
    for abort in get_parts(recovery, "aborts"):
        time = abort.get("ended_at") or recovery.get("done_at") or abort.get("ordered_at")
        aborts_by_time.setdefault(str(time), []).append(abort)
    for time, aborts in aborts_by_time.items():
        pids = [f"pid {abort.get('pid', '?')} on {abort.get('host', '?')}" for abort in aborts]
        shown = abbreviate_list(pids, _MAX_PIDS_SHOWN)
        yield time, f"{'; '.join(format_outcomes(aborts))} ({shown})"


def format_clock(stamp: object) -> str:
    """``18:40:05 UTC`` for an RFC 3339 time in UTC."""
    return f"{clean_text(str(stamp))[11:19]} UTC"


def get_signal_name(number: object) -> str:
    """``SIGTERM`` for 15."""
    try:
        return signal.Signals(int(str(number))).name
    except ValueError:  # a real-time signal has no name
        return f"signal {clean_text(number)}"
