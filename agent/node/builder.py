"""Has the recorder in C++ built where a rank would have used it: in the background, once a node agent, for the next job."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from typing import Any

from ..recorder.native import build, cache
from .log import Log


class Builder:
    """Starts the build in a process of its own, which goes on if the node agent leaves."""

    def __init__(self, log: Log, env: Mapping[str, str] = os.environ) -> None:
        self._log = log
        self._env = env
        self._done = False
        self._process: subprocess.Popen[bytes] | None = None

    def look(self, identity: Mapping[str, Any]) -> None:
        """``identity`` is a rank's: it says why the native recorder does not serve there."""
        if self._process is not None and (status := self._process.poll()) is not None:
            self._log.info(f"the native recorder {'is built' if not status else 'could not be built, hangwatch doctor says why'}")
            self._process = None
        if self._done or identity.get("without") != cache.NOT_BUILT:
            return
        self._done = True
        if build.compiler_of(self._env) is None:
            self._log.info(f"the native recorder is not built: {build.NO_COMPILER}")
            return
        try:
            self._process = subprocess.Popen(
                build.command(), env=build.environment(self._env), cwd="/", start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except OSError as error:
            self._log.info(f"the native recorder is not built: {error}")
