"""NVIDIA's GPUs, by NVML: memory errors, throttling, links, and kernels that spin.

NVML may block for long on a sick GPU, so that it is only called in a process of its own (`reader`).
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

from hangwatch.model.hardware import Observation, ObservedValue, Weight

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
    if not (host.sys / "module" / "nvidia").exists():
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
        yield from _GpuReader(pynvml, index, device, frozenset(host.pids)).read_all()


class _GpuReader:
    """Reads one GPU. What the GPU or the driver does not support is left out."""

    def __init__(self, nvml: Any, index: int, device: Any, pids: frozenset[int]) -> None:
        self._nvml = nvml
        self._index = index
        self._device = device
        self._pids = pids

    def read_all(self) -> Iterator[Observation]:
        for read in (
            self._read_memory_errors,
            self._read_remapped_rows,
            self._read_throttling,
            self._read_power,
            self._read_link_width,
            self._read_nvlinks,
            self._read_processes,
        ):
            # Each is read by itself, since an older driver lacks some of these functions.
            with contextlib.suppress(self._nvml.NVMLError, AttributeError):
                yield from read()

    def _observe(
        self, what: str, now: ObservedValue, weight: Weight = Weight.HINT, **flags: bool
    ) -> Observation:
        return observe(SOURCE, f"GPU {self._index}", what, now, weight, **flags)

    def _read_memory_errors(self) -> Iterator[Observation]:
        count = self._nvml.nvmlDeviceGetTotalEccErrors(
            self._device,
            self._nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            self._nvml.NVML_VOLATILE_ECC,
        )
        yield self._observe("uncorrected_memory_errors", count, Weight.FAULT, is_counter=True)

    def _read_remapped_rows(self) -> Iterator[Observation]:
        _, _, is_pending, has_failed = self._nvml.nvmlDeviceGetRemappedRows(self._device)
        if is_pending:
            yield self._observe("row_remapping_pending", 1, Weight.FAULT, is_abnormal=True)
        if has_failed:
            yield self._observe("row_remapping_failed", 1, Weight.FAULT, is_abnormal=True)

    def _read_throttling(self) -> Iterator[Observation]:
        bits = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._device)
        reasons = [name for bit, name in _THROTTLE_REASONS.items() if bits & bit]
        if reasons:
            yield self._observe("throttled", ", ".join(reasons), is_abnormal=True)

    def _read_power(self) -> Iterator[Observation]:
        """NCCL's kernels spin while a GPU waits for others: full utilisation at little power."""
        busy = self._nvml.nvmlDeviceGetUtilizationRates(self._device).gpu
        power_mw = self._nvml.nvmlDeviceGetPowerUsage(self._device)
        limit_mw = self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._device)
        if busy >= 99 and power_mw < _SPINNING_POWER_SHARE * limit_mw:
            text = f"{busy} % busy at {power_mw // 1000} of {limit_mw // 1000} W"
            yield self._observe("spins", text, is_abnormal=True)
        elif busy == 0:
            yield self._observe("idle", f"{power_mw // 1000} W", is_abnormal=True)

    def _read_link_width(self) -> Iterator[Observation]:
        width = self._nvml.nvmlDeviceGetCurrPcieLinkWidth(self._device)
        widest = self._nvml.nvmlDeviceGetMaxPcieLinkWidth(self._device)
        yield self._observe("pcie_link_width", f"x{width} of x{widest}", is_abnormal=width < widest)

    def _read_nvlinks(self) -> Iterator[Observation]:
        for error, what in _NVLINK_ERRORS.items():
            total = 0
            for link in range(self._nvml.NVML_NVLINK_MAX_LINKS):
                with contextlib.suppress(self._nvml.NVMLError):  # this GPU has fewer links
                    total += self._nvml.nvmlDeviceGetNvLinkErrorCounter(self._device, link, error)
            yield self._observe(what, total, is_counter=True)

    def _read_processes(self) -> Iterator[Observation]:
        """Other processes on the GPU. If NVML lists none of our pids, its pids belong to another pid
        namespace and cannot be compared.
        """
        running = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._device)
        foreign = sorted({process.pid for process in running} - self._pids)
        if foreign and len(foreign) < len(running):
            yield self._observe("other_processes", ", ".join(map(str, foreign)), is_abnormal=True)
