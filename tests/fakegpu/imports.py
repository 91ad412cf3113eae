"""Reads which vendor libraries and symbols an installed torch imports, with their version tags."""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

# Where the version tag does not name the library, the symbol's prefix does. The first match counts.
_PREFIXES = (
    ("nccl", "libnccl.so"),
    ("cuFile", "libcufile.so"),
    ("cusparseLt", "libcusparseLt.so"),
    ("nvshmem", "libnvshmem_host.so"),
    ("curand", "libcurand.so"),
    ("cudnn", "libcudnn.so"),
    ("nvrtc", "libnvrtc.so"),
    ("nvml", "libnvidia-ml.so"),
)
_DRIVER_SYMBOL = re.compile(r"cu[A-Z]")
_VENDOR_LIBRARY = re.compile(r"lib(cu|nccl|nvrtc|nvJit|nvshmem|nvidia)[A-Za-z_-]*\.so")
_DYNAMIC_SYMBOL = re.compile(
    r"\*UND\*\s+[0-9a-f]+\s+(?:\((?P<tag>[^)]*)\)|(?P<base>\S+))?\s+(?P<name>\S+)$"
)
_NEEDED = re.compile(r"\(NEEDED\).*\[(?P<name>[^\]]+)\]")


@dataclass(slots=True)
class VendorLibrary:
    """One shared library to stand in for: its file name, and the symbols wanted from it by version tag ("": none)."""

    soname: str
    symbols: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    @property
    def short_name(self) -> str:
        """`cudart` for `libcudart.so.13`."""
        return self.soname.removeprefix("lib").split(".so")[0]


def read_imports(library_folder: Path) -> dict[str, VendorLibrary]:
    """Return the vendor libraries that the shared libraries in `library_folder` need, by soname.

    Raises `subprocess.CalledProcessError` if binutils cannot read a file, `FileNotFoundError` if they are not installed.
    """
    vendor: dict[str, VendorLibrary] = {}
    unplaced: set[tuple[str, str]] = set()
    for path in sorted(library_folder.glob("*.so*")):
        for soname in _needed_libraries(path):
            vendor.setdefault(soname, VendorLibrary(soname))
        for name, tag in _undefined_symbols(path):
            if _VENDOR_LIBRARY.match(tag):
                vendor.setdefault(tag, VendorLibrary(tag)).symbols[tag].add(name)
            else:
                unplaced.add((name, tag))
    _place_by_prefix(vendor, unplaced)
    # torch opens these two by name.
    for soname in ("libcuda.so.1", "libnvidia-ml.so.1"):
        vendor.setdefault(soname, VendorLibrary(soname))
    return vendor


def _place_by_prefix(vendor: dict[str, VendorLibrary], symbols: set[tuple[str, str]]) -> None:
    for name, tag in symbols:
        stem = next((s for prefix, s in _PREFIXES if name.startswith(prefix)), "")
        if not stem and _DRIVER_SYMBOL.match(name):
            stem = "libcuda.so"
        for soname, library in vendor.items():
            if stem and soname.startswith(stem + "."):
                library.symbols[tag].add(name)


def _needed_libraries(path: Path) -> list[str]:
    output = _run("readelf", "-d", str(path))
    names = [match["name"] for match in _NEEDED.finditer(output)]
    return [name for name in names if _VENDOR_LIBRARY.match(name)]


def _undefined_symbols(path: Path) -> list[tuple[str, str]]:
    symbols = []
    for line in _run("objdump", "-T", str(path)).splitlines():
        match = _DYNAMIC_SYMBOL.search(line)
        if match is not None:
            tag = match["tag"] or ""
            symbols.append((match["name"], "" if tag == "Base" else tag))
    return symbols


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
