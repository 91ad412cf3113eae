"""Has the recorder in C++ built where a rank would have used it: in the background, once a node
agent, for the next job.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...recorder.native import build, cache
from ..system import memory
from ..system.log import AgentLog

REQUIRED_MEMORY_BYTES = 2 << 30  # bytes: the compiler takes up to 0.9 GB, and torch beside it 0.4


class RecorderBuilder:
    """Starts the build in a process of its own, which goes on if the node agent leaves."""

    def __init__(
        self,
        log: AgentLog,
        env: Mapping[str, str] = os.environ,
        *,
        command: Sequence[str] = (),
        get_free_memory: Callable[[], int] = memory.get_free_memory_bytes,
    ) -> None:
        self._log = log
        self._env = env
        self._command = command or build.get_build_command()
        self._get_free_memory = get_free_memory
        self._build_attempted = False
        self._process: subprocess.Popen[bytes] | None = None

    def update_build(self, identity: Mapping[str, Any]) -> None:
        """``identity`` is a rank's: it says why the native recorder does not serve there."""
        if self._process is not None and (status := self._process.poll()) is not None:
            how = (
                "could not be built: hangwatch doctor says why"
                if status
                else "is built, for the next job"
            )
            self._log.info(f"the native recorder {how}")
            self._process = None
        if not self._build_attempted and identity.get("without") == cache.NOT_BUILT_REASON:
            self._build_attempted = True
            if why := self._start_build():
                self._log.info(f"the native recorder is not built: {why}")

    def _start_build(self) -> str:
        """Why not, where it does not."""
        if build.find_compiler(self._env) is None:
            return build.NO_COMPILER_MESSAGE
        if self._get_free_memory() < REQUIRED_MEMORY_BYTES:
            return (
                f"less than {REQUIRED_MEMORY_BYTES >> 30} GiB of memory are left to this job;"
                " hangwatch doctor builds it where there is more"
            )
        try:
            self._process = subprocess.Popen(
                self._command, env=build.make_build_environment(self._env), cwd="/", start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except OSError as error:
            return str(error)
        return ""
