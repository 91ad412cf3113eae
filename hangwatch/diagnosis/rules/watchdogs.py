"""Ranks that were ended by their own watchdog: victims of what they waited for, which is the cause."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hangwatch.diagnosis import messages
from hangwatch.diagnosis.context import DiagnosisContext
from hangwatch.diagnosis.device_view import build_device_view
from hangwatch.diagnosis.graph.devices import DeviceHang
from hangwatch.model.verdicts import Verdict
from hangwatch.tracking.process import Process

from .devices import make_stalled_verdict, make_stuck_verdict
from .failures import get_failure_time
from .timeouts import diagnose_timeout, make_unfinished_verdict

# A rank that aborts sooner, and alone, was not ended because of its peers.
_MIN_VICTIM_WAIT_S = 3.0


def has_waited(aborted: Iterable[Process]) -> bool:
    """Whether ranks that were aborted in a collective are victims: several were, or the only one
    had waited for a while. A rank that fails by itself, as on an error of its device, does so soon.
    """
    waits_s = [_get_device_wait_s(process) for process in aborted]
    return len(waits_s) > 1 or max(waits_s, default=0.0) >= _MIN_VICTIM_WAIT_S


def _get_device_wait_s(process: Process) -> float:
    return get_failure_time(process) - max(process.device_changed_at, process.newest_call_at)


def diagnose_watchdog_end(
    context: DiagnosisContext, first: Process, failed: set[int], *, due: bool
) -> None:
    """Adds the verdict on what ``first``, which its watchdog ended before others, waited for."""
    view = build_device_view(context.attempt, ended=failed)
    hang = view.hang if view is not None else DeviceHang(waits=[])
    waiting = failed | context.graph.get_waiting_ranks()
    verdict: Verdict | None = None
    culprits = set() if view is None else view.find_stuck_ranks()
    if view is not None and culprits and not hang.uncertain_ends:
        waiting |= hang.find_waiters_of(hang.culprits) | hang.culprits
        waiting -= culprits
        verdict = make_stuck_verdict(view, culprits, waiting, hang, due=due)
    elif view is not None and hang.stalled_groups and not hang.host_ends:
        group = hang.stalled_groups[0]
        waiting.update(group.ranks)
        # Its end proves that the call did not just take long, so that no grace is needed.
        has_stalled = view.get_waited_s(group.ranks) >= context.limits.stall_after_s
        verdict = make_stalled_verdict(context, view, group, waiting, due=due or has_stalled)
    elif diagnose_timeout(context, first, failed, get_failure_time(first), due=due):
        return
    if verdict is None:
        last = first.newest_stream
        assert last is not None  # it has a device with calls
        verdict = make_unfinished_verdict(first, last, waiting, due=due)
    end = messages.describe_timeout(first, is_by_watchdog=True)
    context.verdicts.append(replace(verdict, summary=f"{verdict.summary}; {end}"))
    context.explained_ranks |= {*verdict.culprits, *verdict.waiting}
