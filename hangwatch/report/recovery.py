"""The measures of --on-hang abort for an incident, as text. Pure; mostly from the API's JSON
documents, which may lack fields.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Sequence

from .text import Document, abbreviate_list, clean_text, name_ranks

_MAX_PIDS_SHOWN = 4


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
    state, aborts = recovery.get("state"), recovery.get("aborts") or []
    if state == "withheld":
        return f"No rank is ended: {clean_text(recovery.get('why') or '?')}."
    has_result = any(abort.get("result") in ("ended", "failed") for abort in aborts)
    number, limit = clean_text(recovery.get("number", "?")), clean_text(recovery.get("limit", "?"))
    count = f"{number} of at most {limit} such incidents of this job"
    if state == "done" or has_result:
        outcomes = "; ".join(format_outcomes(aborts))
        return f"{outcomes[:1].upper()}{outcomes[1:]} ({count})."
    if state not in ("planned", "announced", "ordered"):
        return ""
    if document.get("status") != "open":
        has_progress = document.get("resolution") == "progress"
        reason = "made progress" if has_progress else "ended"
        return f"No rank was ended: the job {reason} before."
    ranks = recovery.get("ranks") or []
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
        # The reason for which a rank could not be ended, or the signal that ended it.
        detail = clean_text(abort.get("error") or "")
        if not detail and abort.get("signal") is not None:
            detail = get_signal_name(abort["signal"])
        outcome = (str(abort.get("result")), detail)
        ranks_by_outcome.setdefault(outcome, []).append(abort.get("rank", -1))
    for (result, detail), ranks in ranks_by_outcome.items():
        names = name_ranks(ranks)
        be, was = ("is", "was") if len(ranks) == 1 else ("are", "were")
        if result == "ended":
            yield f"{names} {was} ended by {detail}"
        elif result == "gone":
            yield f"{names} had ended before"
        elif result == "left":
            yield f"{names} {was} not ended, as the job moved or did not report"
        elif result == "failed":
            yield f"{names} could not be ended: {detail}"
        else:
            yield f"{names} {be} being ended"


def iter_recovery_events(document: Document) -> Iterator[tuple[str, str]]:
    """The events of a recovery, for a history: (RFC 3339 time, text)."""
    recovery = document.get("recovery") or {}
    names = name_ranks(recovery.get("ranks") or [])
    if recovery.get("state") == "withheld":
        reason = clean_text(recovery.get("why") or "?")
        yield str(recovery["planned_at"]), f"hangwatch does not end any rank: {reason}"
    elif recovery.get("planned_at"):
        due = format_clock(recovery.get("due_at"))
        yield (
            str(recovery["planned_at"]),
            f"hangwatch was to end {names}, unless the job moved by {due}",
        )
    if recovery.get("announced_at"):
        yield str(recovery["announced_at"]), f"hangwatch announced that it ends {names}"
    aborts_by_time: dict[str, list[Document]] = {}
    for abort in recovery.get("aborts") or []:
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
