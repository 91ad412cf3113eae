"""Versions of what lies below Python, to be compared with known problems."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hangwatch.model.hardware import Observation, Weight

from .host import Host, list_names, read_text

SOURCE = "versions"

# The wheel's folder lies beside the library: nvidia_nccl_cu12-2.27.3.dist-info.
_NCCL_LIBRARY = re.compile(r"\s(/\S*/nvidia/nccl/lib/libnccl\.so\S*)")
_NCCL_WHEEL = re.compile(r"nvidia_nccl_cu\d+-([\d.]+)\.dist-info")


def probe(host: Host) -> tuple[Observation, ...]:
    return tuple(_read_versions(host))


def _read_versions(host: Host) -> Iterator[Observation]:
    kernel = read_text(host.proc / "sys" / "kernel" / "osrelease")
    driver = read_text(host.sys / "module" / "nvidia" / "version")
    for about, version in (("kernel", kernel), ("driver", driver), ("nccl", _find_nccl(host))):
        if version:
            yield Observation(
                source=SOURCE, about=about, what="version", now=version, weight=Weight.FACT
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
