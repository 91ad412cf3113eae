"""The communication backends of torch.distributed, and what can be observed of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSpec:
    """One backend. A backend without an entry is assumed to have the defaults."""

    # Its calls run on a device, whose Work objects cannot be queried without disturbing the device.
    is_device: bool = False
    # Its Flight Recorder adds an entry after the parts of a coalesced call.
    records_coalesced_end: bool = False
    # Its Flight Recorder counts what the device has begun and completed; torch reports the counters
    # by `_dump_nccl_trace_json`.
    counts_device_progress: bool = False
    # The Work of a call on the CPU reports its completion, by `Work::finish`.
    reports_completion: bool = False
    worker_threads: tuple[str, ...] = ()  # names of the threads that carry out its calls


_NCCL_LIKE = BackendSpec(is_device=True, records_coalesced_end=True)
_NCCL = BackendSpec(is_device=True, records_coalesced_end=True, counts_device_progress=True)

BACKENDS: dict[str, BackendSpec] = {
    "nccl": _NCCL,
    "ncclx": _NCCL_LIKE,
    "rccl": _NCCL_LIKE,
    "rcclx": _NCCL_LIKE,
    "xccl": _NCCL_LIKE,
    "hccl": _NCCL_LIKE,
    "mccl": BackendSpec(is_device=True),
    "gloo": BackendSpec(
        reports_completion=True,
        worker_threads=("pt_gloo_runloop",),  # c10::setThreadName in ProcessGroupGloo.cpp
    ),
}

DEVICE_BACKENDS = tuple(name for name, spec in BACKENDS.items() if spec.is_device)
FLIGHT_RECORDER_BACKENDS = tuple(
    name for name, spec in BACKENDS.items() if spec.counts_device_progress
)
REPORTING_BACKENDS = tuple(name for name, spec in BACKENDS.items() if spec.reports_completion)
COALESCED_END_BACKENDS = tuple(
    name for name, spec in BACKENDS.items() if spec.records_coalesced_end
)
WORKER_THREAD_NAMES = tuple(thread for spec in BACKENDS.values() for thread in spec.worker_threads)
