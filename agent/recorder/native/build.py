"""Provides the native recorder for the torch of this interpreter, in the cache: the wheel's if it
works here, else a new one. ``python -P -m hangwatch.agent.recorder.native.build``.

A node agent runs this in the background, `hangwatch doctor` in the foreground, no training process.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...environment.run_dir import make_private_folder
from . import cache
from .cache import Environment

COMPILE_TIMEOUT_S = 600.0
CHECK_TIMEOUT_S = 120.0
COMPILERS = ("c++", "g++", "clang++")
NO_COMPILER_MESSAGE = (
    "there is no C++ compiler: install one (on Debian and Ubuntu: apt-get install g++), or name it"
    " in CXX"
)
# The beginning of code that runs in a process of its own.
PROCESS_PRELUDE = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; from hangwatch.agent.recorder.native"
)


class BuildError(Exception):
    """The recorder could not be built. The message gives the reason and the remedy."""


def get_build_command() -> list[str]:
    """The command that runs `main` in a process of its own."""
    return [sys.executable, "-c", f"{PROCESS_PRELUDE} import build; sys.exit(build.main())"]


def make_bare_environment(env: Environment) -> dict[str, str]:
    """``env`` for a process that imports torch or hangwatch, but is neither a rank nor watched."""
    bare = {**env, "PYTHONSAFEPATH": "1"}
    for name in ("HANGWATCH_URL", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
        bare.pop(name, None)
    return bare


def build_recorder(env: Environment) -> Path:
    """The path of a recorder that works here, which is built if necessary. Raises BuildError; a
    failure that would repeat is recorded in the cache.
    """
    if why := cache.explain_unsupported():
        raise BuildError(why)
    if (found := _find_library(env)) is not None:
        return found
    target = cache.get_library_path(env)
    try:
        make_private_folder(target.parent)
        with target.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # other processes wait, and then find it built
            if (found := _find_library(env)) is not None:
                return found
            prebuilt = cache.find_prebuilt(only_tested=False)
            if prebuilt is not None:
                with contextlib.suppress(OSError, BuildError):  # the wheel's does not work here
                    cache.verify_library(prebuilt)
                    check_library(prebuilt, env)
                    with _replace_when_complete(target) as copy:
                        shutil.copyfile(prebuilt, copy)
                    return target
            _compile_recorder(target, env)
    except OSError as error:
        raise BuildError(
            f"the cache {target.parent} cannot be used: {error}; set HANGWATCH_CACHE_DIR to one"
            " that can"
        ) from error
    return target


def build_plugin(env: Environment) -> Path:
    """The path of the plugin for NCCL, which is built if necessary. Raises BuildError; a failure that
    would repeat is recorded in the cache.
    """
    target = cache.get_plugin_path(env)
    try:
        if (found := _find_plugin(env)) is not None:
            return found
        make_private_folder(target.parent)
        with target.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (found := _find_plugin(env)) is not None:
                return found
            compiler = find_compiler(env)
            if compiler is None:
                raise BuildError(NO_COMPILER_MESSAGE)
            try:
                with _replace_when_complete(target) as new_plugin:
                    compile_plugin(new_plugin, compiler, env)
                    cache.append_digest(new_plugin)
            except BuildError as error:
                target.with_suffix(".failed").write_text(str(error))
                raise
    except OSError as error:
        raise BuildError(
            f"the cache {target.parent} cannot be used: {error}; set HANGWATCH_CACHE_DIR to one"
            " that can"
        ) from error
    return target


def _find_plugin(env: Environment) -> Path | None:
    """The plugin that training processes load; None if it is absent or incomplete."""
    try:
        return cache.find_plugin(env)
    except PermissionError as error:
        raise BuildError(str(error)) from error
    except OSError:
        return None


def compile_plugin(output: Path, compiler: Sequence[str], env: Environment) -> None:
    """Compiles the plugin for NCCL. Raises BuildError."""
    source = str(cache.PLUGIN_SOURCE_PATH)
    command = [*compiler, *cache.PLUGIN_FLAGS, source, "-lc", "-o", str(output)]
    _run_command(command, COMPILE_TIMEOUT_S, env)


def _find_library(env: Environment) -> Path | None:
    """The recorder that training processes load; None if it is absent or incomplete."""
    try:
        return cache.find_library(env)
    except PermissionError as error:
        raise BuildError(str(error)) from error
    except OSError:
        return None


def _compile_recorder(target: Path, env: Environment) -> None:
    compiler = find_compiler(env)
    if compiler is None:
        raise BuildError(NO_COMPILER_MESSAGE)
    try:
        with _replace_when_complete(target) as new_library:
            compile_library(new_library, compiler, env)
            check_library(new_library, env)
            cache.append_digest(new_library)
    except BuildError as error:
        target.with_suffix(".failed").write_text(str(error))
        raise


@contextlib.contextmanager
def _replace_when_complete(target: Path) -> Iterator[Path]:
    """Yields a path beside ``target``, whose file replaces it at the end of the block."""
    # Builds that were killed have left such files behind.
    for leftover in target.parent.glob(f"{glob.escape(target.stem)}.[0-9]*"):
        leftover.unlink()
    new_library = target.with_suffix(f".{os.getpid()}")
    try:
        yield new_library
        new_library.chmod(0o700)
        new_library.replace(target)
        target.with_suffix(".failed").unlink(missing_ok=True)
    finally:
        new_library.unlink(missing_ok=True)


def compile_library(output: Path, compiler: Sequence[str], env: Environment) -> None:
    """Compiles the recorder for the torch of this interpreter. Raises BuildError."""
    import torch

    root = Path(torch.__file__).parent
    command = [
        *compiler,
        *cache.get_compiler_flags(),
        str(cache.SOURCE_PATH),
        f"-I{root / 'include'}",
        f"-I{root / 'include/torch/csrc/api/include'}",
        f"-L{root / 'lib'}",
        "-ltorch_cpu",
        "-lc10",
        "-o",
        str(output),
    ]
    _run_command(command, COMPILE_TIMEOUT_S, env)


def check_library(library: Path, env: Environment) -> None:
    """Tries a recorder in a process of its own. Raises BuildError if it does not work."""
    check = f"{PROCESS_PRELUDE} import check; check.main(sys.argv[1])"
    _run_command(
        [sys.executable, "-c", check, str(library)], CHECK_TIMEOUT_S, make_bare_environment(env)
    )


def find_compiler(env: Environment) -> list[str] | None:
    """The command of a C++ compiler: the one in CXX, else the first on PATH; None if there is none."""
    if command := env.get("CXX", "").split():
        return command
    for name in COMPILERS:
        path = shutil.which(name, path=env.get("PATH"))
        if path:
            return [path]
    return None


def _run_command(argv: list[str], limit_s: float, env: Environment) -> None:
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            env=dict(env),
            cwd="/",
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{argv[0]}: {error}") from error
    if done.returncode:
        output = (done.stdout + done.stderr).splitlines()
        messages = [line for line in output if "rror" in line] or done.stderr.splitlines()
        raise BuildError(
            f"{Path(argv[0]).name} ended with status {done.returncode}:"
            f" {messages[-1][:300] if messages else 'without a message'}"
        )


def main() -> int:
    os.nice(19)
    # The kernel kills this process first if memory runs out (proc(5)), and not the job.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    builders = [build_recorder]
    if cache.get_nccl_level(os.environ) != "off":
        builders.append(build_plugin)
    status = 0
    for build in builders:
        try:
            print(build(os.environ))
        except BuildError as error:
            print(f"hangwatch: {error}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
