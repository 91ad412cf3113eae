"""The call streams of the ranks of a `parallel_job` on NCCL. Pure.

A call only queues work for the device: the host queues a step's calls in the first half of the step and
then waits for its device. Nothing reports which calls are complete, but the counters of the
collectives do, as with TORCH_FR_BUFFER_SIZE=2000. After a fault, the hosts of all ranks but the
culprit queue the rest of the step, and their devices wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from hangwatch.model.kinds import VerdictKind
from hangwatch.ring.parts import DeviceEntry

from .parallel_job import STEP_S, TENSOR_PARALLEL_SIZE, HostPosition, JobRun, SimulatedFault
from .parallel_streams import (
    DP,
    DP_CALLS,
    EXCHANGE_FROM,
    PP_CALLS,
    RECV_NEXT,
    RECV_PREV,
    SEND_NEXT,
    SEND_PREV,
    TP,
    TP_CALLS,
    WORLD,
    WORLD_CALLS,
    SimulatedStream,
    make_queued_stream,
)

HOST_SPEED = 2.0  # of hosts, compared with that of devices
_RANKS_WITHOUT_CULPRIT = frozenset(
    {VerdictKind.NO_PROGRESS, VerdictKind.DEVICE_STUCK, VerdictKind.MISMATCH}
)
COUNTERS_AGE_S = 0.5
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class _Progress:
    """How many steps a rank's host has queued and its device has executed."""

    host: float
    device: float
    last_call_at: float  # when the host queued the newest call


def get_wait_began_at(run: JobRun, fault: SimulatedFault) -> float:
    """When the hosts of all ranks but the culprits have queued the remaining calls of the step."""
    step_part = run.count_steps(fault.starts_at) % 1.0
    return fault.starts_at + max(0.0, 1.0 / HOST_SPEED - step_part) * STEP_S


def get_devices_stopped_at(run: JobRun, fault: SimulatedFault) -> float:
    """When the devices of the other replicas are blocked as well."""
    step_part = run.count_steps(fault.starts_at) % 1.0
    return fault.starts_at + (EXCHANGE_FROM - step_part) * STEP_S


def waits_for_device(run: JobRun, rank: int, now: float) -> bool:
    """Whether its host has queued a step's calls."""
    return _find_progress(run, rank, now).host % 1.0 == 0.0


def list_queued_streams(run: JobRun, rank: int, now: float) -> list[SimulatedStream]:
    """All streams of a rank except that of the set-up."""
    progress = _find_progress(run, rank, now)
    host, at = progress.host, progress.last_call_at
    exchanged_at = (
        at if host % 1.0 >= EXCHANGE_FROM or host == int(host) else max(run.started_at, at - STEP_S)
    )
    streams = [
        make_queued_stream(WORLD, WORLD_CALLS, run.started_at),
        make_queued_stream(TP, _count_tensor_calls(host), at),
        make_queued_stream(DP, _count_data_calls(host), exchanged_at),
    ]
    messages = _count_calls(host, PP_CALLS)
    stage = HostPosition.of_host(run.shape, rank // TENSOR_PARALLEL_SIZE).stage
    if stage + 1 < run.shape.pipeline:
        streams += [make_queued_stream(uid, messages, at) for uid in (SEND_NEXT, RECV_NEXT)]
    if stage:
        streams += [make_queued_stream(uid, messages, at) for uid in (SEND_PREV, RECV_PREV)]
    fault = run.active_fault(now)
    if fault is not None and fault.kind is VerdictKind.MISMATCH and fault.rank == rank:
        tensor_stream = streams[1]
        tensor_stream.op, tensor_stream.hash_change = "broadcast", 1
        tensor_stream.changed_from = _count_tensor_calls(_find_stop(run, fault)) + 1
    return streams


def list_device_entries(run: JobRun, rank: int, now: float) -> tuple[DeviceEntry, ...]:
    """The counters of a rank's device, of each group with collectives."""
    progress = _find_progress(run, rank, now)
    fault = run.active_fault(now)
    is_stuck = fault is not None and fault.kind is VerdictKind.DEVICE_STUCK and fault.rank == rank
    read_ns = int((now - COUNTERS_AGE_S) * 1e9)
    return tuple(
        DeviceEntry(uid=uid, enqueued=enqueued, started=None, completed=completed, read_ns=read_ns)
        for uid, enqueued, completed in (
            (WORLD, WORLD_CALLS, WORLD_CALLS),
            (
                TP,
                _count_tensor_calls(progress.host),
                _count_tensor_calls(progress.device) - is_stuck,
            ),
            (DP, _count_data_calls(progress.host), _count_data_calls(progress.device)),
        )
    )


def _find_progress(run: JobRun, rank: int, now: float) -> _Progress:
    fault = run.active_fault(now)
    if fault is None:
        device = run.count_steps(now)
        host = _advance_host(device)
        waited_s = max(0.0, device % 1.0 - 1.0 / HOST_SPEED) * STEP_S
        return _Progress(host, device, now - waited_s)
    steps = run.count_steps(fault.starts_at) + (now - fault.starts_at) / STEP_S
    stop = _find_stop(run, fault)
    step = int(run.count_steps(fault.starts_at))
    if _is_culprit(fault, rank):
        return _Progress(stop, min(steps, stop), fault.starts_at)
    position = HostPosition.of_host(run.shape, rank // TENSOR_PARALLEL_SIZE)
    culprit = HostPosition.of_host(run.shape, fault.host)
    is_same_replica = position.replica == culprit.replica
    host = step + min(1.0, HOST_SPEED * (steps - step))
    device = min(steps, stop if is_same_replica else step + EXCHANGE_FROM)
    return _Progress(host, device, min(now, get_wait_began_at(run, fault)))


def _is_culprit(fault: SimulatedFault, rank: int) -> bool:
    """Whether its host makes no further calls."""
    return fault.kind not in _RANKS_WITHOUT_CULPRIT and rank in fault.list_culprits()


def _find_stop(run: JobRun, fault: SimulatedFault) -> float:
    """The position of the last call that the culprit's host queues."""
    return _advance_host(run.count_steps(fault.starts_at))


def _advance_host(device: float) -> float:
    """The position of a host whose device is at this one."""
    return int(device) + min(1.0, HOST_SPEED * (device % 1.0))


def _count_tensor_calls(position: float) -> int:
    return _count_calls(position, TP_CALLS)


def _count_calls(position: float, step_calls: int) -> int:
    """The number of calls before the exchange of gradients, which are evenly spaced."""
    done_part = min(1.0, position % 1.0 / EXCHANGE_FROM + _ROUNDING)
    return step_calls * int(position) + int(step_calls * done_part)


def _count_data_calls(position: float) -> int:
    exchanged_part = max(0.0, position % 1.0 - EXCHANGE_FROM) / (1.0 - EXCHANGE_FROM)
    return DP_CALLS * int(position) + int(DP_CALLS * exchanged_part)
