"""Where the built recorder lies, and for what it was built: one file for each torch, interpreter,
machine and source.
"""

from __future__ import annotations

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
_DIGEST_BYTES = 16  # bytes
RECORDER_MODES = ("auto", "native", "python")


def get_recorder_mode(env: Mapping[str, str]) -> str:
    """HANGWATCH_RECORDER; what it does not know counts as auto."""
    mode = env.get("HANGWATCH_RECORDER", "")
    return mode if mode in RECORDER_MODES else "auto"


def explain_unsupported() -> str:
    """Why it cannot serve here, compiler or not; empty where it can. Imports torch."""
    import torch

    if get_frame_layout() is None:
        return (
            f"where {platform.python_implementation()} {platform.python_version()} keeps its frames"
            " is not known"
        )
    if sys.byteorder != "little":
        return f"the ring is little-endian, {platform.machine()} is not"
    if not hasattr(torch.classes.c10d.ReduceOp(), "op"):
        return (
            f"torch {torch.__version__} cannot say which reduction a call asks for, as 2.7 and"
            " later can"
        )
    return ""


def get_compiler_flags() -> list[str]:
    """What the compiler is told besides the files. Imports torch."""
    import torch

    abi: Any = torch._C._GLIBCXX_USE_CXX11_ABI
    return ["-O2", "-std=c++20", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={int(abi)}"]


def get_library_path(env: Mapping[str, str]) -> Path:
    """The built recorder of this torch and interpreter, whether it is there or not. Imports torch."""
    import torch

    tag = f"torch-{torch.__version__}-{sysconfig.get_config_var('SOABI')}"
    made_of = (
        SOURCE_PATH.read_text(),
        get_compiler_flags(),
        torch.version.git_version,
        sys.version,
        platform.machine(),
    )
    digest = hashlib.blake2b(repr(made_of).encode(), digest_size=8).hexdigest()
    return get_cache_dir(env) / f"recorder-{tag}-{digest}.so"


def get_cache_dir(env: Mapping[str, str]) -> Path:
    """HANGWATCH_CACHE_DIR, else the user's cache (XDG Base Directory Specification)."""
    if given := env.get("HANGWATCH_CACHE_DIR"):
        return Path(given)
    return Path(
        env.get("XDG_CACHE_HOME") or Path(env.get("HOME") or "~").expanduser() / ".cache",
        "hangwatch",
    )


def append_digest(library_path: Path) -> None:
    """Ends the file with a digest of itself, which whatever loads it does not look at."""
    with library_path.open("r+b") as file:
        file.write(_compute_digest(file.read()))


def verify_library(library_path: Path) -> None:
    """Raises an OSError where the file must not be loaded: none there, not whole, or one that
    somebody else could have put there.

    A part of a library, as a host that loses its power may leave one, ends the process that loads
    it (SIGBUS).
    """
    for place in (library_path, library_path.parent):
        found = os.stat(place)
        if found.st_uid not in (os.getuid(), 0) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(
                f"{place} can be written by others: only you may, to have it loaded (chmod go-w)"
            )
    content = library_path.read_bytes()
    if content[-_DIGEST_BYTES:] != _compute_digest(content[:-_DIGEST_BYTES]):
        raise OSError(f"{library_path} is not whole: hangwatch doctor builds it anew")


def _compute_digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def read_build_failure(library_path: Path) -> str:
    """Why building it failed the last time; empty where it did not."""
    try:
        return library_path.with_suffix(".failed").read_text(errors="replace")
    except OSError:
        return ""
