"""NVIDIA's GPUs, by NVML: memory errors, throttling, links, and kernels that spin.

NVML may block for long on a sick GPU, so that it is only called in a process of its own (`reader`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from typing import Any

from hangwatch.model.hardware import Observation, Weight

from .host import Host, SourceUnavailableError, observe

SOURCE = "nvml"

# Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h) other than idleness and user settings.
_THROTTLE_REASONS = {
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}
# A kernel that only waits takes less than this share of the power limit, at full utilisation.
_SPINNING_POWER_SHARE = 0.4
_NVLINK_ERRORS = {0: "nvlink_replays", 1: "nvlink_recoveries", 2: "nvlink_crc_errors"}


def check(host: Host) -> None:
    """Raises SourceUnavailableError without NVIDIA's driver or the module that calls NVML."""
    if not (host.sys / "module/nvidia").exists():
        raise SourceUnavailableError("this host has no NVIDIA driver")
    if importlib.util.find_spec("pynvml") is None:
        raise SourceUnavailableError(
            "the module pynvml is not installed", "pip install 'hangwatch[nvml]'"
        )


def probe(host: Host) -> Iterator[Observation]:
    """All GPUs of the host. Raises SourceUnavailableError without NVML or its Python module."""
    check(host)
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise SourceUnavailableError(f"NVML does not start: {error}") from None
    version = pynvml.nvmlSystemGetDriverVersion()
    if isinstance(version, bytes):
        version = version.decode(errors="replace")
    yield observe(SOURCE, "driver", "version", version, Weight.FACT)
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            device = pynvml.nvmlDeviceGetHandleByIndex(index)
        except pynvml.NVMLError as error:  # a GPU that fell off the bus
            yield observe(
                SOURCE, f"GPU {index}", "lost", str(error), Weight.FAULT, is_abnormal=True
            )
            continue
        yield from _read_gpu(pynvml, index, device, frozenset(host.pids))


def _read_gpu(nvml: Any, index: int, device: Any, pids: frozenset[int]) -> Iterator[Observation]:
    """One GPU. Each part is read by itself, since an older driver lacks some of these functions, and
    what the GPU or the driver does not support is left out.
    """
    may_lack = contextlib.suppress(nvml.NVMLError, AttributeError)
    make_observation = functools.partial(observe, SOURCE, f"GPU {index}")
    with may_lack:
        count = nvml.nvmlDeviceGetTotalEccErrors(
            device, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
        yield make_observation("uncorrected_memory_errors", count, Weight.FAULT, is_counter=True)
    with may_lack:
        _, _, is_pending, has_failed = nvml.nvmlDeviceGetRemappedRows(device)
        if is_pending:
            yield make_observation("row_remapping_pending", 1, Weight.FAULT, is_abnormal=True)
        if has_failed:
            yield make_observation("row_remapping_failed", 1, Weight.FAULT, is_abnormal=True)
    with may_lack:
        bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device)
        reasons = [name for bit, name in _THROTTLE_REASONS.items() if bits & bit]
        if reasons:
            yield make_observation("throttled", ", ".join(reasons), is_abnormal=True)
    with may_lack:
        # NCCL's kernels spin while a GPU waits for others: full utilisation at little power.
        busy = nvml.nvmlDeviceGetUtilizationRates(device).gpu
        power_mw = nvml.nvmlDeviceGetPowerUsage(device)
        limit_mw = nvml.nvmlDeviceGetEnforcedPowerLimit(device)
        if busy >= 99 and power_mw < _SPINNING_POWER_SHARE * limit_mw:
            text = f"{busy} % busy at {power_mw // 1000} of {limit_mw // 1000} W"
            yield make_observation("spins", text, is_abnormal=True)
        elif busy == 0:
            yield make_observation("idle", f"{power_mw // 1000} W", is_abnormal=True)
    with may_lack:
        width = nvml.nvmlDeviceGetCurrPcieLinkWidth(device)
        widest = nvml.nvmlDeviceGetMaxPcieLinkWidth(device)
        text = f"x{width} of x{widest}"
        yield make_observation("pcie_link_width", text, is_abnormal=width < widest)
    with may_lack:
        for error, what in _NVLINK_ERRORS.items():
            total = 0
            for link in range(nvml.NVML_NVLINK_MAX_LINKS):
                with contextlib.suppress(nvml.NVMLError):  # this GPU has fewer links
                    total += nvml.nvmlDeviceGetNvLinkErrorCounter(device, link, error)
            yield make_observation(what, total, is_counter=True)
    with may_lack:
        # If NVML lists none of our pids, its pids are those of another namespace and cannot be compared.
        running = nvml.nvmlDeviceGetComputeRunningProcesses(device)
        foreign = sorted({process.pid for process in running} - pids)
        if foreign and len(foreign) < len(running):
            text = ", ".join(map(str, foreign))
            yield make_observation("other_processes", text, is_abnormal=True)
