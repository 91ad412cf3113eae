"""Reads sources: here, or in a process of their own if a driver may block them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from hangwatch.model.hardware import Observation, UnavailableSource, Weight

from . import probes
from .host import Host, SourceUnavailableError
from .sources import Source

TIME_LIMIT_S = 5.0
_KILL_WAIT_S = 0.5
_BLOCKED_REMEDY = (
    "its driver or device may be blocked: see /proc/PID/stack of the reader, and the kernel log"
)

SourceResult = tuple[tuple[Observation, ...], UnavailableSource | None]


def read_source(source: Source, host: Host) -> SourceResult:
    """Reads a source here. Whatever goes wrong with it is returned, not raised."""
    return probes.run_probe(source.name, source.probe, host)


def find_absence(source: Source, host: Host) -> UnavailableSource | None:
    """Why a source cannot be read, as far as that can be said without a process; None if it may."""
    try:
        source.check(host)
    except SourceUnavailableError as error:
        return UnavailableSource(source=source.name, reason=error.reason, remedy=error.remedy)
    return None


class ReaderProcess:
    """A process that reads sources that may block, all at the same time. It inherits the environment
    and nothing else.
    """

    def __init__(
        self, sources: Sequence[Source], host: Host, command: tuple[str, ...] | None = None
    ) -> None:
        """Raises OSError if the process cannot be started."""
        self._names = [source.name for source in sources]
        module = (
            ("-P", "-m", probes.__name__)
            if sys.version_info >= (3, 11)
            else ("-m", probes.__name__)
        )
        self._process = subprocess.Popen(
            [
                *(command or (sys.executable, *module)),
                ",".join(map(str, host.pids)),
                *(f"{source.name}={source.probe.__module__}" for source in sources),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
        )

    def collect(self, timeout_s: float) -> list[SourceResult]:
        """Waits for the results, one of each source in their order. A process that is late is killed,
        and hardly waited for: in a driver it may not end.
        """
        is_late = False
        try:
            output, _ = self._process.communicate(timeout=max(0.0, timeout_s))
        except subprocess.TimeoutExpired as error:
            is_late, output = True, error.output or b""
            self._abandon()
        results: dict[str, SourceResult] = {}
        for line in output.splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                document = json.loads(line)
                results[document["source"]] = _decode_result(document)
        return [results.get(name) or self._explain_missing(name, is_late) for name in self._names]

    def _explain_missing(self, name: str, is_late: bool) -> SourceResult:
        if not is_late:
            reason = f"its reader ended with status {self._process.returncode}"
            return (), UnavailableSource(source=name, reason=reason, remedy="please report this")
        reason = f"it did not answer within {TIME_LIMIT_S:g} seconds"
        blocked = Observation(
            source=name,
            about=name,
            what="does_not_return",
            now=f"{TIME_LIMIT_S:g} s",
            is_abnormal=True,
        )
        return (blocked,), UnavailableSource(source=name, reason=reason, remedy=_BLOCKED_REMEDY)

    def _abandon(self) -> None:
        self._process.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_KILL_WAIT_S)


def _decode_result(document: dict[str, Any]) -> SourceResult:
    observations = tuple(
        Observation(**{**item, "weight": Weight(item.get("weight", Weight.HINT))})
        for item in document["observations"]
    )
    unavailable = document["unavailable"]
    return observations, UnavailableSource(**unavailable) if unavailable else None
