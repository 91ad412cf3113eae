"""Generates and compiles the stand-in libraries for one installed torch."""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.fakegpu.imports import VendorLibrary, read_imports

CPP_FOLDER = Path(__file__).parent / "cpp"
_CORE_SOURCES = (
    "device.cpp",
    "streams.cpp",
    "graphs.cpp",
    "memory.cpp",
    "faults.cpp",
    "kernels.cpp",
)
_FLAGS = (
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
    "-fvisibility=hidden",
    "-pthread",
)
_DESCRIBE_TORCH = """
import importlib.metadata as metadata, importlib.util, json, pathlib, re
version = metadata.version("torch")
names = [r for r in metadata.requires("torch") or [] if "nccl" in r]
nccl = re.search(r"==([0-9.]+)", names[0])[1] if names else "2.27.5"
folder = pathlib.Path(importlib.util.find_spec("torch").origin).parent
print(json.dumps({"version": version, "nccl": nccl, "folder": str(folder)}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchInstallation:
    """What the stand-ins must know of an installed torch."""

    version: str
    nccl_version: str
    library_folder: Path

    @property
    def nccl_code(self) -> int:
        """NCCL's version as one number: 22907 for 2.29.7."""
        major, minor, patch = (int(part) for part in self.nccl_version.split(".")[:3])
        return major * 10000 + minor * 100 + patch


def describe_torch(python: Path) -> TorchInstallation:
    """Ask the interpreter which torch it has, without importing it."""
    result = subprocess.run(
        [python, "-c", _DESCRIBE_TORCH], check=True, capture_output=True, text=True
    )
    answer = json.loads(result.stdout)
    return TorchInstallation(
        version=answer["version"],
        nccl_version=answer["nccl"],
        library_folder=Path(answer["folder"]) / "lib",
    )


def build_libraries(python: Path, out: Path) -> Path:
    """Build the stand-ins for `python`'s torch into `out` and return it; does nothing if they are up to date.

    Raises `subprocess.CalledProcessError` if the compiler fails; its messages go to stderr.
    """
    out.mkdir(parents=True, exist_ok=True)
    with (out / "lock").open("w") as lock:
        # Tests run in parallel, and the first one builds.
        fcntl.flock(lock, fcntl.LOCK_EX)
        _build_unless_current(describe_torch(python), out)
    return out


def _build_unless_current(torch: TorchInstallation, out: Path) -> None:
    stamp = out / "stamp"
    fingerprint = f"{torch.version} {_source_hash()}"
    if stamp.exists() and stamp.read_text() == fingerprint:
        return
    vendor = read_imports(torch.library_folder)
    cuda_major = _cuda_major(vendor)
    definitions = (
        f"-DFAKEGPU_CUDA_MAJOR={cuda_major}",
        f"-DFAKEGPU_CUDA_VERSION={cuda_major * 1000}",
        f"-DFAKEGPU_NCCL_CODE={torch.nccl_code}",
    )
    _compile_core(out, definitions)
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(_compile_vendor, library, out, definitions) for library in vendor.values()
        ]
        for job in jobs:
            job.result()
    stamp.write_text(fingerprint)


def _source_hash() -> str:
    digest = hashlib.sha256()
    for path in [
        *sorted(CPP_FOLDER.iterdir()),
        Path(__file__),
        Path(__file__).with_name("imports.py"),
    ]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _cuda_major(vendor: dict[str, VendorLibrary]) -> int:
    for soname in vendor:
        match = re.fullmatch(r"libcudart\.so\.(\d+)", soname)
        if match is not None:
            return int(match[1])
    raise ValueError("this torch is no CUDA build: it does not need libcudart")


def _compile_core(out: Path, definitions: tuple[str, ...]) -> None:
    sources = [CPP_FOLDER / name for name in _CORE_SOURCES]
    flags = [flag for flag in _FLAGS if not flag.startswith("-fvisibility")]
    _compile(
        [
            *flags,
            *definitions,
            "-shared",
            "-Wl,-soname,libcuda-standin.so",
            *sources,
            "-o",
            out / "libcuda-standin.so",
        ]
    )


def _compile_vendor(library: VendorLibrary, out: Path, definitions: tuple[str, ...]) -> None:
    name = library.short_name
    work = out / "work" / name
    work.mkdir(parents=True, exist_ok=True)
    sources = _handwritten_sources(name)
    objects = []
    for source in sources:
        target = work / f"{source.stem}.o"
        _compile(
            [
                *_FLAGS,
                *definitions,
                f"-DFAKEGPU_LIB_{name.replace('-', '_')}",
                "-c",
                source,
                "-o",
                target,
            ]
        )
        objects.append(target)
    defined = _defined_symbols(objects)
    generated = work / "generated.cpp"
    wanted = set().union(*library.symbols.values())
    generated.write_text(_stub_source(wanted - defined))
    script = work / "versions"
    script.write_text(_version_script(library))
    _compile(
        [
            *_FLAGS,
            "-shared",
            f"-Wl,-soname,{library.soname}",
            f"-Wl,--version-script={script}",
            generated,
            *objects,
            f"-L{out}",
            "-Wl,--no-as-needed",
            "-lcuda-standin",
            "-Wl,-rpath,$ORIGIN",
            "-o",
            out / library.soname,
        ]
    )


def _handwritten_sources(name: str) -> list[Path]:
    own = sorted(CPP_FOLDER.glob(f"{name}_*.cpp"))
    return own or [CPP_FOLDER / "vendor.cpp"]


def _defined_symbols(objects: list[Path]) -> set[str]:
    output = subprocess.run(
        ["nm", "--defined-only", "-g", *objects], check=True, capture_output=True, text=True
    )
    return {line.split()[-1] for line in output.stdout.splitlines() if len(line.split()) == 3}


def _stub_source(names: set[str]) -> str:
    lines = [
        "// Generated: what torch imports and no program here depends on. Each succeeds and does nothing."
    ]
    lines += [
        f'extern "C" __attribute__((visibility("default"))) long {name}() {{ return 0; }}'
        for name in sorted(names)
    ]
    return "\n".join(lines) + "\n"


def _version_script(library: VendorLibrary) -> str:
    tags = sorted(tag for tag in library.symbols if tag)
    if not tags:
        return "{ global: *; };\n"
    # The first tag takes everything, what is asked for by name and what is not; a further tag takes its own symbols.
    blocks = [f"{tags[0]} {{ global: *; }};"]
    blocks += [
        f"{tag} {{ global: {'; '.join(sorted(library.symbols[tag]))}; }};" for tag in tags[1:]
    ]
    return "\n".join(blocks) + "\n"


def _compile(arguments: list[str | Path]) -> None:
    result = subprocess.run(["g++", *arguments], capture_output=True, text=True)
    if result.returncode:
        sys.stderr.write(result.stderr)
        raise subprocess.CalledProcessError(result.returncode, ["g++", *map(str, arguments)])
