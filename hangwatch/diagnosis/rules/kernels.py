"""Hangs of devices, by the kernels that they execute, where jobs allow a debugger to show them.

A debugger stops the ranks for seconds. Their kernels are therefore requested once for a hang that is
confirmed, of few ranks, and after their stacks.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from hangwatch.model.kernels import Kernels, runs_nccl
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.verdicts import Verdict, Wait
from hangwatch.report.terminal import describe_kernels

from ..context import DiagnosisContext, EvidenceRequest
from ..graph.progress import has_device_calls, waits_for_device
from ..messages import describe_position, describe_ranks, format_waiter_count

_MAX_RANKS_READ = 8  # the ranks of a host take turns, for some 11 s each
# The kernels of at most one member in this many may be unknown where the others' name a culprit.
_MEMBERS_PER_UNKNOWN = 8
_MAX_WAITS_SHOWN = 64


def diagnose_kernels(context: DiagnosisContext) -> None:
    """Requests the kernels that would explain a hang. Where they show which devices the others wait for in
    a call that makes no progress, the verdict is that these are stuck.
    """
    for index, verdict in enumerate(context.verdicts):
        if verdict.is_confirmed:
            for rank in _list_ranks_to_read(context, verdict):
                context.requests.append(EvidenceRequest(rank=rank, kernels=True))
        if verdict.kind is VerdictKind.NO_PROGRESS:
            context.verdicts[index] = _name_stuck_devices(context, verdict)


def _list_ranks_to_read(context: DiagnosisContext, verdict: Verdict) -> list[int]:
    """The ranks of a verdict whose kernels are needed and were not read since it began."""
    since = verdict.began_at
    candidates = verdict.culprits
    if verdict.kind is VerdictKind.NO_PROGRESS:
        group = verdict.group
        candidates = verdict.waiting if group is None or group.foreign else group.ranks
    processes = list(context.iter_alive(candidates[:_MAX_RANKS_READ]))
    if verdict.kind is VerdictKind.NO_PROGRESS:
        processes = [process for process in processes if has_device_calls(process)]
    elif verdict.kind in (VerdictKind.MISSING_RANK, VerdictKind.SLOW_RANK):
        processes = [process for process in processes if waits_for_device(process, since)]
    elif verdict.kind not in (VerdictKind.DEVICE_STUCK, VerdictKind.QUIET_JOB):
        return []
    awaited_stacks = {request.rank for request in context.requests if request.stacks}
    ranks = []
    for process in processes:
        is_read = process.kernels is not None and process.kernels.taken_at >= since
        is_sampled = any(sample.taken_at >= since for sample in process.samples)
        is_next = is_sampled or process.rank not in awaited_stacks
        if process.identity.gpu_stacks and not is_read and is_next:
            ranks.append(process.rank)
    return ranks


def _name_stuck_devices(context: DiagnosisContext, verdict: Verdict) -> Verdict:
    """The verdict on a call that makes no progress, or one on the few devices that are in kernels of their
    own while all others are in NCCL's.
    """
    group = verdict.group
    kernels_at = context.attempt.kernels_at
    if group is None or group.foreign or not kernels_at or kernels_at < verdict.began_at:
        return verdict
    outside: dict[int, Kernels] = {}
    inside: dict[int, Kernels] = {}
    known_count = 0
    for process in context.attempt.find_processes(group.ranks):
        since = max(verdict.began_at, process.last_advanced_at, process.device_changed_at)
        kernels = process.get_kernels_since(since)
        if kernels is not None:
            known_count += 1
            if kernels:
                members = inside if runs_nccl(kernels) else outside
                members[process.rank] = kernels
    unknown_count = len(group.ranks) - known_count
    are_few = len(outside) == 1 or len(outside) < len(inside)
    # A device without any kernel may be the one at fault.
    is_clear = len(outside) + len(inside) == known_count
    if unknown_count * _MEMBERS_PER_UNKNOWN > len(group.ranks) or not is_clear:
        return verdict
    if not outside or not inside or not are_few:
        return verdict
    culprits = tuple(sorted(outside))
    waiting = tuple(sorted({*verdict.waiting, *group.ranks}.difference(culprits)))
    waits: tuple[Wait, ...] = ()
    if verdict.seq is not None:
        pairs = ((rank, on_rank) for on_rank in culprits for rank in sorted(inside))
        waits = tuple(
            Wait(rank=rank, on_rank=on_rank, group=group.name, seq=verdict.seq)
            for rank, on_rank in islice(pairs, _MAX_WAITS_SHOWN)
        )
    context.request_stacks(culprits, (), verdict.began_at)
    return replace(
        verdict,
        kind=VerdictKind.DEVICE_STUCK,
        culprits=culprits,
        waiting=waiting,
        waits=waits,
        summary=(
            f"{describe_kernels(outside)}, while {describe_kernels(inside)} in"
            f" {describe_position(group, verdict.seq)}; {format_waiter_count(len(waiting))}"
        ),
        advice=(
            f"Look for what launches that kernel on {describe_ranks(culprits)}: it does not end, waits for what"
            " never comes, or is one of many that take as long together. Check the GPU itself, too"
            " (nvidia-smi, dmesg)."
        ),
    )
