"""Builds the native recorder for the next job if a rank lacks it: in the background, once per node
agent, and only if the host or the container has enough free memory.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...recorder.native import build, cache
from ..system import processes
from ..system.runtime import AgentLog

REQUIRED_MEMORY_BYTES = 2 << 30  # the compiler uses up to 0.9 GB, and torch 0.4 GB
_CGROUP_ROOT = "/sys/fs/cgroup"
# The files of the limit and of the usage for each version of control groups, and the counters in
# memory.stat of memory that the kernel can reclaim.
_MEMORY_FILES = (
    ("memory.max", "memory.current", ("active_file", "inactive_file")),
    (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
)


def get_free_memory_bytes(proc: str = processes.PROC_ROOT, cgroup_root: str = _CGROUP_ROOT) -> int:
    """The free memory of the host, or of the container that this process is in; 0 if it is unknown.
    Sources: proc(5), and Documentation/admin-guide/cgroup-v{1,2} of the kernel.
    """
    free_bytes = []
    with contextlib.suppress(OSError, KeyError, ValueError):
        free_bytes.append(_parse_counters(Path(proc, "meminfo"))["MemAvailable:"] << 10)
    folders = [
        folder
        for base, group in processes.list_cgroups("self", {"memory"}, Path(proc), Path(cgroup_root))
        for folder in (group, *group.parents)
        if folder.is_relative_to(base)
    ]
    for folder in folders:
        for limit_file, usage_file, reclaimable in _MEMORY_FILES:
            with contextlib.suppress(OSError, KeyError, ValueError):  # another version, or "max"
                counters = _parse_counters(folder / "memory.stat")
                limit = int((folder / limit_file).read_text())
                usage = int((folder / usage_file).read_text())
                usage -= sum(counters[name] for name in reclaimable)
                free_bytes.append(limit - usage)
    return min(free_bytes, default=0)


def _parse_counters(file: Path) -> dict[str, int]:
    rows = [line.split() for line in file.read_text().splitlines()]
    return {name: int(value) for name, value, *_ in rows}


class RecorderBuilder:
    """Starts the build in a separate process, which continues if the node agent exits."""

    def __init__(
        self,
        log: AgentLog,
        env: Mapping[str, str] = os.environ,
        *,
        command: Sequence[str] = (),
        get_free_memory: Callable[[], int] = get_free_memory_bytes,
    ) -> None:
        self._log = log
        self._env = env
        self._command = command or build.get_build_command()
        self._get_free_memory = get_free_memory
        self._build_attempted = False
        self._process: subprocess.Popen[bytes] | None = None

    def update_build(self, identity: Mapping[str, Any]) -> None:
        """Starts the build if it is needed, and logs its result.

        ``identity`` is a rank's, with the reasons why it does not use the native recorder, and the
        plugin for NCCL that it asked for.
        """
        status = self._process.poll() if self._process is not None else None
        if status is not None:
            self._process = None
            self._log.info(
                "the native recorder could not be built: hangwatch doctor says why"
                if status
                else "the native recorder is built, for the next job"
            )
        reasons = identity.get("without"), identity.get("without_plugin")
        if self._build_attempted or cache.NOT_BUILT_REASON not in reasons:
            return
        self._build_attempted = True
        problem = ""
        if build.find_compiler(self._env) is None and not cache.has_prebuilt():
            problem = build.NO_COMPILER_MESSAGE
        elif self._get_free_memory() < REQUIRED_MEMORY_BYTES:
            problem = (
                f"less than {REQUIRED_MEMORY_BYTES >> 30} GiB of memory are left to this job;"
                " hangwatch doctor builds it where there is more"
            )
        else:
            try:
                self._process = subprocess.Popen(
                    self._command,
                    env=build.make_bare_environment(self._env),
                    cwd="/",
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            except OSError as error:
                problem = str(error)
        if problem:
            self._log.info(f"the native recorder is not built: {problem}")
