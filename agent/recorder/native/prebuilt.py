"""The recorders that a wheel brings along: one for each minor version of torch and machine.

They depend on torch's C++ interfaces, which stay the same in the patch releases of a minor version,
and on the frames of Python, whose layout they are told; not on Python's own interfaces. The manifest
says with which releases each one was tried when the wheel was built. With another one it is tried
first, in a process of its own (`build.build_recorder`).
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import cache

FOLDER = Path(__file__).with_name("prebuilt")
MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrebuiltRecorder:
    """``is_tested``: it was tried with this release of torch and this minor version of Python."""

    path: Path
    is_tested: bool


def find_prebuilt(folder: Path = FOLDER) -> PrebuiltRecorder | None:
    """The recorder of the wheel for this torch and machine; None if there is none. Imports torch."""
    try:
        manifest = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
        if manifest["sources"] != hash_sources():
            return None  # built from other sources than those installed here
        name = get_library_name()
        tested = manifest["recorders"][name]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    path = folder / name
    return PrebuiltRecorder(path=path, is_tested=describe_releases() in tested)


def has_recorders(folder: Path = FOLDER) -> bool:
    """Whether the wheel has any."""
    return (folder / MANIFEST_NAME).exists()


def get_library_name() -> str:
    """The file name of the recorder for this torch and machine. Imports torch."""
    import torch

    minor = "_".join(torch.__version__.split(".")[:2])
    abi: Any = torch._C._GLIBCXX_USE_CXX11_ABI
    return f"recorder_torch_{minor}_{platform.machine()}_{'cxx11' if abi else 'precxx11'}.so"


def describe_releases() -> dict[str, str]:
    """The releases that a recorder is tried with, as in the manifest. All builds of one release of
    torch, such as those for the CPU and for CUDA, are made from the same commit. Imports torch.
    """
    import torch

    return {
        "torch": str(torch.version.git_version),
        "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
    }


def hash_sources() -> str:
    """Of the library's sources, whose functions `library` calls."""
    return hashlib.blake2b(repr(cache.read_sources()).encode(), digest_size=8).hexdigest()
