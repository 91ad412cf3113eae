"""Whether torch will count how far the devices have come in NCCL's collectives."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hangwatch.ring.layout import DeviceStatusState

from ...node.reporting.device_updates import find_missing_setting
from .findings import Finding

NAME = "devices"
_BUFFER_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
# The first version that is known to have the Flight Recorder on by default. 2.9 has it off.
_ON_BY_DEFAULT = (2, 11)
_NCCL2_DEFAULT = (2, 15)  # the first version whose "nccl" is `nccl2`, which counts no starts


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """The installed torch."""

    version: str
    has_nccl: bool  # built for CUDA

    @property
    def release(self) -> tuple[int, int]:
        match = re.match(r"(\d+)\.(\d+)", self.version)
        return (int(match[1]), int(match[2])) if match else (0, 0)


def check_devices(env: Mapping[str, str]) -> Iterator[Finding]:
    """Nothing where torch has no NCCL."""
    build = find_torch()
    if build is not None and build.has_nccl:
        yield judge_torch(build, env)


def judge_torch(build: TorchBuild, env: Mapping[str, str]) -> Finding:
    """What this torch counts in a job with this environment."""
    if _has_buffer(build, env):
        detail = "torch counts how far they have come, in its Flight Recorder"
        if build.release >= _NCCL2_DEFAULT and env.get("TORCH_DIST_USE_NCCL2") != "0":
            detail += ", but not the collectives that they have begun"
        return Finding(name=NAME, ok=True, detail=detail)
    setting = find_missing_setting(DeviceStatusState.OFF, build.version)
    return Finding(
        name=NAME,
        ok=None,
        detail=f"torch {build.version} does not count how far they have come in NCCL's collectives",
        remedy=f"set {setting} in the job's environment: then hangwatch can name a device that lags",
    )


def _has_buffer(build: TorchBuild, env: Mapping[str, str]) -> bool:
    for name in _BUFFER_VARIABLES:
        if size := env.get(name):
            return size.strip().isdecimal() and int(size) > 0
    return build.release >= _ON_BY_DEFAULT


def find_torch() -> TorchBuild | None:
    """The installed torch, without importing it, which takes seconds."""
    try:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        source = Path(spec.origin).with_name("version.py").read_text()
    except (ImportError, ValueError, OSError):
        return None
    return parse_torch_build(source)


def parse_torch_build(source: str) -> TorchBuild | None:
    """The build that a ``torch/version.py`` describes.

    >>> parse_torch_build("__version__ = '2.9.1+cu128'\\ncuda: Optional[str] = '12.8'\\nhip = None")
    TorchBuild(version='2.9.1+cu128', has_nccl=True)
    """
    assigned = dict(re.findall(r"^(\w+)(?:\s*:[^=\n]+)?\s*=\s*['\"](.+?)['\"]", source, re.M))
    if "__version__" not in assigned:
        return None
    return TorchBuild(version=assigned["__version__"], has_nccl="cuda" in assigned)
