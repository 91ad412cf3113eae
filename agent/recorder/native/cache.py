"""The cache of built recorders: one file for each torch, interpreter, machine and version of the
sources.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import stat
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .frames import get_frame_layout

SOURCE_PATH = Path(__file__).with_name("recorder.cpp")
NOT_BUILT_REASON = "it is not built yet: a node agent builds it in the background, for the next job"
_DIGEST_BYTES = 16
RECORDER_MODES = ("auto", "native", "python")


def get_recorder_mode(env: Mapping[str, str]) -> str:
    """The value of HANGWATCH_RECORDER; an unknown one counts as auto."""
    mode = env.get("HANGWATCH_RECORDER", "")
    return mode if mode in RECORDER_MODES else "auto"


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


def get_library_path(env: Mapping[str, str]) -> Path:
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


@functools.cache
def read_sources() -> Mapping[str, str]:
    """The text of the library's source and of its headers, by file name."""
    folder = SOURCE_PATH.parent
    paths = [SOURCE_PATH, *sorted(folder.glob("*.h"))]
    return {path.name: path.read_text() for path in paths}


def get_cache_dir(env: Mapping[str, str]) -> Path:
    """HANGWATCH_CACHE_DIR, else the user's cache (XDG Base Directory Specification)."""
    if configured := env.get("HANGWATCH_CACHE_DIR"):
        return Path(configured)
    return Path(
        env.get("XDG_CACHE_HOME") or Path(env.get("HOME") or "~").expanduser() / ".cache",
        "hangwatch",
    )


def append_digest(library_path: Path) -> None:
    """Appends a digest of the file to it, which the dynamic loader ignores."""
    with library_path.open("r+b") as file:
        file.write(_compute_digest(file.read()))


def verify_library(library_path: Path) -> None:
    """Raises OSError if the file must not be loaded: it does not exist, is incomplete, or another user
    could have written it.

    Loading an incomplete library, which a power failure can leave, kills the process (SIGBUS).
    """
    for path in (library_path, library_path.parent):
        status = os.stat(path)
        is_foreign = status.st_uid not in (os.getuid(), 0)
        if is_foreign or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(
                f"{path} can be written by other users, so it is not loaded (chmod go-w)"
            )
    for folder in library_path.parent.resolve().parents:
        if os.stat(folder).st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
            raise PermissionError(
                f"{folder} can be written by all users, so {library_path} is not loaded"
                f" (chmod o-w {folder})"
            )
    content = library_path.read_bytes()
    if content[-_DIGEST_BYTES:] != _compute_digest(content[:-_DIGEST_BYTES]):
        raise OSError(f"{library_path} is incomplete: hangwatch doctor builds it again")


def _compute_digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def read_build_failure(library_path: Path) -> str:
    """Why the last build failed; empty if it did not."""
    try:
        return library_path.with_suffix(".failed").read_text(errors="replace")
    except OSError:
        return ""
