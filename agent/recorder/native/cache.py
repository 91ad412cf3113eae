"""The files of built recorders: the cache, with one for each torch, interpreter, machine and
version of the sources; and those in a wheel, one for each minor version of torch and machine.

A recorder depends on torch's C++ interfaces, which stay the same in the patch releases of a minor
version, and on the layout of Python's frames, which is passed to it (`get_frame_layout`); not on
Python's own interfaces. The wheel's manifest says with which releases each recorder was tried when
the wheel was built. With another one, `build.build_recorder` tries it in a process of its own.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import platform
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hangwatch.model.ownership import check_ownership

Environment = Mapping[str, str]

SOURCE_PATH = Path(__file__).with_name("recorder.cpp")
PLUGIN_SOURCE_PATH = Path(__file__).with_name("nccl_plugin.cpp")
PREBUILT_FOLDER = Path(__file__).with_name("prebuilt")
_MANIFEST_PATH = PREBUILT_FOLDER / "manifest.json"
NOT_BUILT_REASON = "it is not built yet: a node agent builds it in the background, for the next job"
_DIGEST_BYTES = 16
RECORDER_MODES = ("auto", "native", "python")
NCCL_LEVELS = ("off", "calls", "device")
PLUGIN_VARIABLE = "NCCL_PROFILER_PLUGIN"  # from which NCCL loads its plugin
# The plugin needs no library but libc, so that one file serves every torch and interpreter.
PLUGIN_FLAGS = (
    "-O2", "-std=c++20", "-fPIC", "-shared", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden",
    "-nodefaultlibs", "-Wl,-z,nodelete", "-Wl,-z,defs",
)  # fmt: skip


def get_recorder_mode(env: Environment) -> str:
    """The value of HANGWATCH_RECORDER; an unknown one counts as auto."""
    mode = env.get("HANGWATCH_RECORDER", "")
    return mode if mode in RECORDER_MODES else "auto"


def get_nccl_level(env: Environment) -> str:
    """The value of HANGWATCH_NCCL; an unknown one counts as off."""
    level = env.get("HANGWATCH_NCCL", "")
    return level if level in NCCL_LEVELS else "off"


def explain_unsupported() -> str:
    """Why the native recorder cannot work here even if it is built; empty if it can."""
    if get_frame_layout() is None:
        return (
            f"the layout of the frames of {platform.python_implementation()}"
            f" {platform.python_version()} is not known"
        )
    if sys.byteorder != "little":
        return f"the ring is little-endian, {platform.machine()} is not"
    return ""


def get_compiler_flags() -> list[str]:
    """The flags of the compiler, without the files. Imports torch."""
    import torch

    abi: Any = torch._C._GLIBCXX_USE_CXX11_ABI
    return ["-O2", "-std=c++20", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={int(abi)}"]


def get_library_path(env: Environment) -> Path:
    """The path of the recorder for this torch and interpreter, built or not. Imports torch."""
    import torch

    tag = f"torch-{torch.__version__}-{sysconfig.get_config_var('SOABI')}"
    inputs = (
        read_sources(),
        get_compiler_flags(),
        torch.version.git_version,
        sys.version,
        platform.machine(),
    )
    digest = hashlib.blake2b(repr(inputs).encode(), digest_size=8).hexdigest()
    return get_cache_dir(env) / f"recorder-{tag}-{digest}.so"


def get_plugin_path(env: Environment) -> Path:
    """The path of the plugin for NCCL in the cache, built or not."""
    name = f"nccl-plugin-{platform.machine()}-{hash_plugin_sources()}.so"
    return get_cache_dir(env) / name


@functools.cache
def hash_plugin_sources() -> str:
    """The hash of what the plugin is built from."""
    inputs = PLUGIN_SOURCE_PATH.read_text(), PLUGIN_FLAGS
    return hashlib.blake2b(repr(inputs).encode(), digest_size=8).hexdigest()


def find_plugin(env: Environment) -> Path | None:
    """The plugin that NCCL may load: that of the cache, else that of the wheel; None if there is
    none. Raises OSError if the one found must not be loaded.
    """
    path = get_plugin_path(env)
    try:
        verify_library(path)
        return path
    except FileNotFoundError:
        pass
    prebuilt = PREBUILT_FOLDER / get_prebuilt_plugin_name()
    try:
        manifest = json.loads(_MANIFEST_PATH.read_text(encoding="utf-8"))
        if manifest["plugin_sources"] != hash_plugin_sources() or not prebuilt.exists():
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    verify_library(prebuilt)
    return prebuilt


def get_prebuilt_plugin_name() -> str:
    """The file name of the wheel's plugin for this machine."""
    return f"nccl_plugin_{platform.machine()}.so"


def read_plugin_failure(env: Environment) -> str:
    """Why the last build of the plugin failed; empty if it did not."""
    try:
        return get_plugin_path(env).with_suffix(".failed").read_text(errors="replace")
    except OSError:
        return ""


@functools.cache
def read_sources() -> Mapping[str, str]:
    """The text of the library's source and of its headers, by file name."""
    folder = SOURCE_PATH.parent
    paths = [SOURCE_PATH, *sorted(folder.glob("*.h"))]
    return {path.name: path.read_text() for path in paths}


def get_cache_dir(env: Environment) -> Path:
    """HANGWATCH_CACHE_DIR, else the user's cache (XDG Base Directory Specification)."""
    if configured := env.get("HANGWATCH_CACHE_DIR"):
        return Path(configured)
    if base := env.get("XDG_CACHE_HOME"):
        return Path(base, "hangwatch")
    return Path(env.get("HOME") or "~").expanduser() / ".cache/hangwatch"


def append_digest(library_path: Path) -> None:
    """Appends a digest of the file to it, which the dynamic loader ignores."""
    with library_path.open("r+b") as file:
        file.write(_compute_digest(file.read()))


def verify_library(library_path: Path) -> None:
    """Raises OSError if the file is absent, incomplete, or could have been written by other users.

    Loading an incomplete library, which a power failure can leave, kills the process (SIGBUS).
    """
    check_ownership(library_path)
    content = library_path.read_bytes()
    if content[-_DIGEST_BYTES:] != _compute_digest(content[:-_DIGEST_BYTES]):
        raise OSError(f"{library_path} is incomplete: hangwatch doctor builds it again")


def _compute_digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def find_library(env: Environment) -> Path | None:
    """The recorder that a training process may load: that of the cache, else that of the wheel if
    it was tried with this release of torch; None if there is none. Raises OSError if the one found
    must not be loaded. Imports torch.
    """
    path = get_library_path(env)
    try:
        verify_library(path)
        return path
    except FileNotFoundError:
        prebuilt = find_prebuilt(only_tested=True)
    if prebuilt is not None:
        verify_library(prebuilt)
    return prebuilt


def read_build_failure(env: Environment) -> str:
    """Why the last build failed; empty if it did not. Imports torch."""
    try:
        return get_library_path(env).with_suffix(".failed").read_text(errors="replace")
    except OSError:
        return ""


class FrameLayout(ctypes.Structure):
    """The byte offsets of a thread's frames in the interpreter's structs: `FrameLayout` in
    python_frames.h. They stay the same in all patch releases of a Python version.
    """

    _fields_ = (
        # The offset in PyThreadState of the pointer to the newest frame's holder; -1: itself.
        ("indirect", ctypes.c_int32),
        ("newest", ctypes.c_int32),  # the offset in that struct of the pointer to the newest frame
        ("back", ctypes.c_int32),  # the offsets in a frame are this and the next two
        ("code", ctypes.c_int32),
        ("instruction", ctypes.c_int32),
    )


# The sources are Include/cpython/pystate.h, Include/cpython/frameobject.h (3.10) and
# Include/internal/pycore_frame.h of each release.
_FRAME_LAYOUTS = {
    (3, 10): FrameLayout(-1, 24, 24, 32, 96),
    (3, 11): FrameLayout(56, 8, 48, 32, 56),
    (3, 12): FrameLayout(56, 0, 8, 0, 56),
    (3, 13): FrameLayout(-1, 72, 8, 0, 56),
}


def get_frame_layout() -> FrameLayout | None:
    """The layout of this interpreter; None if it is not known."""
    is_standard_build = (
        sys.implementation.name == "cpython"
        and sys.abiflags == ""
        and not sysconfig.get_config_var("Py_GIL_DISABLED")
    )
    return _FRAME_LAYOUTS.get(sys.version_info[:2]) if is_standard_build else None


def find_prebuilt(*, only_tested: bool) -> Path | None:
    """The recorder of the wheel for this torch and machine; with ``only_tested``, only if it was
    tried with this torch and this minor version of Python. None if there is none. Imports torch.
    """
    try:
        manifest = json.loads(_MANIFEST_PATH.read_text(encoding="utf-8"))
        if manifest["sources"] != hash_sources():
            return None  # built from other sources than those installed here
        name = get_prebuilt_name()
        is_tested = describe_releases() in manifest["recorders"][name]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return PREBUILT_FOLDER / name if is_tested or not only_tested else None


def has_prebuilt() -> bool:
    """Whether the wheel has any recorders."""
    return _MANIFEST_PATH.exists()


def get_prebuilt_name() -> str:
    """The file name of the wheel's recorder for this torch and machine. Imports torch."""
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
    """The hash of the library's sources, whose functions `library` calls."""
    return hashlib.blake2b(repr(read_sources()).encode(), digest_size=8).hexdigest()
