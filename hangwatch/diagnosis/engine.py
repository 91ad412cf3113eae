"""Runs all rules on one attempt of a job: one verdict for each root cause.

Ranks that are only delayed by a cause are victims and never named as culprits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hangwatch.model.limits import Limits
from hangwatch.model.verdicts import Verdict
from hangwatch.report.job_status import UnexplainedWait
from hangwatch.tracking.attempt import Attempt

from .advice import (
    add_exception_advice,
    add_kernel_advice,
    add_remote_call_advice,
    add_stack_advice,
)
from .context import DiagnosisContext, EvidenceRequest
from .differences import add_divergence
from .graph.graph import build_wait_graph
from .hardware import add_hardware_advice, request_hardware
from .rules.deadlock import diagnose_deadlocks
from .rules.devices import (
    diagnose_device_cycle,
    diagnose_hosts_behind_devices,
    diagnose_stalled_devices,
    diagnose_stuck_devices,
    diagnose_uncounted_devices,
)
from .rules.ended import diagnose_exits
from .rules.exchanges import diagnose_exchanges, diagnose_invalid_peers
from .rules.kernels import diagnose_kernels
from .rules.mismatch import diagnose_call_mismatches
from .rules.missing import diagnose_chain_ends, drop_outside_members
from .rules.progress import diagnose_no_progress, request_last_calls, sample_busy_ranks
from .rules.quiet import diagnose_quiet_job
from .rules.start import diagnose_world_sizes
from .rules.threads import diagnose_concurrent_use, diagnose_thread_waits
from .rules.values import diagnose_nonfinite, diagnose_replica_divergence
from .unexplained import add_loss_notes, find_unexplained_wait, request_uncounted_stacks

# The order matters: what a definite cause explains is not diagnosed again. A mismatch comes before
# the deaths that it leads to, and a death before the waits for the dead rank.
RULES: tuple[Callable[[DiagnosisContext], None], ...] = (
    request_last_calls,
    diagnose_call_mismatches,
    diagnose_exchanges,
    diagnose_invalid_peers,
    diagnose_exits,
    diagnose_world_sizes,
    diagnose_deadlocks,
    diagnose_device_cycle,
    diagnose_stuck_devices,
    diagnose_hosts_behind_devices,
    diagnose_chain_ends,
    diagnose_thread_waits,
    diagnose_stalled_devices,
    diagnose_no_progress,
    diagnose_uncounted_devices,
    diagnose_concurrent_use,
    diagnose_replica_divergence,
    diagnose_nonfinite,
    sample_busy_ranks,
    request_uncounted_stacks,
    diagnose_quiet_job,
    diagnose_kernels,
    request_hardware,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The verdicts, one per root cause, and the evidence to request from node agents.

    A verdict whose ``is_confirmed`` is False is only a suspicion.
    """

    verdicts: tuple[Verdict, ...] = ()
    requests: tuple[EvidenceRequest, ...] = ()
    unexplained_wait: UnexplainedWait | None = None
    pause_note: str = ""  # why a job in which no rank makes calls is not suspected


def diagnose(attempt: Attempt, now: float, limits: Limits) -> Diagnosis:
    """What is wrong with one attempt of a job at time ``now``."""
    context = DiagnosisContext(
        attempt=attempt,
        now=now,
        limits=limits,
        graph=build_wait_graph(attempt, now, limits),
    )
    for apply_rule in RULES:
        apply_rule(context)
    verdicts = []
    for verdict in context.verdicts:
        verdict = add_divergence(context, verdict)
        verdict = add_stack_advice(context, verdict)
        verdict = add_kernel_advice(context, verdict)
        verdict = add_remote_call_advice(context, verdict)
        verdict = add_exception_advice(context, verdict)
        verdict = add_hardware_advice(context, verdict)
        if attempt.foreign_states:
            verdict = drop_outside_members(verdict)
        verdicts.append(add_loss_notes(context, verdict))
    diagnosis = Diagnosis(
        verdicts=tuple(verdicts),
        requests=tuple(dict.fromkeys(context.requests)),
        unexplained_wait=find_unexplained_wait(context),
        pause_note=context.pause_note,
    )
    context.graph.free_waits()
    return diagnosis
