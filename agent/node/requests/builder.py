"""Builds the native recorder for the next job if a rank lacks it: in the background, once per node
agent.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...recorder.native import build, cache, prebuilt
from ..system import memory
from ..system.log import AgentLog

REQUIRED_MEMORY_BYTES = 2 << 30  # the compiler uses up to 0.9 GB, and torch 0.4 GB


class RecorderBuilder:
    """Starts the build in a separate process, which continues if the node agent exits."""

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
        """Starts the build if it is needed, and logs its result.

        ``identity`` is a rank's: it says why the rank does not use the native recorder.
        """
        if self._process is not None:
            status = self._process.poll()
            if status is not None:
                self._process = None
                self._log_result(is_built=status == 0)
        if not self._build_attempted and identity.get("without") == cache.NOT_BUILT_REASON:
            self._build_attempted = True
            problem = self._start_build()
            if problem:
                self._log.info(f"the native recorder is not built: {problem}")

    def _log_result(self, *, is_built: bool) -> None:
        if is_built:
            self._log.info("the native recorder is built, for the next job")
        else:
            self._log.info("the native recorder could not be built: hangwatch doctor says why")

    def _start_build(self) -> str:
        """Returns why the build was not started; empty if it was."""
        if build.find_compiler(self._env) is None and not prebuilt.has_recorders():
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
