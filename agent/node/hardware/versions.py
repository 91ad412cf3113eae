"""Versions of the layers below Python, to be compared with known problems."""

from __future__ import annotations

import os
import re

from hangwatch.model.hardware import Observation, Weight

from .host import Host, list_names, observe, read_text

SOURCE = "versions"

# The wheel's folder lies beside the library: nvidia_nccl_cu12-2.27.3.dist-info.
_NCCL_LIBRARY = re.compile(r"\s(/\S*/nvidia/nccl/lib/libnccl\.so\S*)")
_NCCL_WHEEL = re.compile(r"nvidia_nccl_cu\d+-([\d.]+)\.dist-info")
_MAX_GROUPS = 64


def probe(host: Host) -> tuple[Observation, ...]:
    """The versions that are known, each as a fact."""
    groups = host.sys / "kernel" / "iommu_groups"
    types = {read_text(groups / name / "type") or "" for name in list_names(groups)[:_MAX_GROUPS]}
    versions = {
        "kernel": read_text(host.proc / "sys" / "kernel" / "osrelease"),
        "machine": os.uname().machine,
        "driver": read_text(host.sys / "module" / "nvidia" / "version"),
        "nccl": _find_nccl(host),
        # How it treats devices: "identity" is a passthrough, "DMA" translates addresses.
        "iommu": " and ".join(sorted(types - {""})),
    }
    return tuple(
        observe(SOURCE, about, "version", version, Weight.FACT)
        for about, version in versions.items()
        if version
    )


def _find_nccl(host: Host) -> str | None:
    """The version of NCCL's wheel whose library a rank has loaded."""
    for pid in host.pids[:1]:
        match = _NCCL_LIBRARY.search(read_text(host.proc / str(pid) / "maps") or "")
        if match is not None:
            library = host.proc / str(pid) / "root" / match[1].lstrip("/")
            for name in list_names(library.parents[3]):
                if wheel := _NCCL_WHEEL.fullmatch(name):
                    return wheel[1]
    return None
