"""Reads one source in a process of its own, which can be abandoned if a driver does not return:
``python -P -m hangwatch.agent.node.hardware.reader SOURCE PID,PID...``. Prints JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from typing import Any

from hangwatch.model.hardware import Observation, UnavailableSource, Weight
from hangwatch.protocol import codec

from .host import Host, SourceUnavailableError
from .sources import SOURCES, Source

TIME_LIMIT_S = 5.0
_KILL_WAIT_S = 0.5
_PR_SET_PDEATHSIG = 1
_BLOCKED_REMEDY = (
    "its driver or device may be blocked: see /proc/PID/stack of the reader, and the kernel log"
)


def read_source(
    source: Source, host: Host
) -> tuple[tuple[Observation, ...], UnavailableSource | None]:
    """Reads a source here. Whatever goes wrong with it is returned, not raised."""
    try:
        return source.probe(host), None
    except SourceUnavailableError as error:
        return (), UnavailableSource(source=source.name, reason=error.reason, remedy=error.remedy)
    except Exception as error:  # the files of an unknown kernel or driver
        reason = f"hangwatch failed to read it: {type(error).__name__}: {error}"
        return (), UnavailableSource(source=source.name, reason=reason, remedy="please report this")


def find_absence(source: Source, host: Host) -> UnavailableSource | None:
    """Why a source cannot be read, as far as that can be said without a process; None if it may."""
    try:
        source.check(host)
    except SourceUnavailableError as error:
        return UnavailableSource(source=source.name, reason=error.reason, remedy=error.remedy)
    return None


class ReaderProcess:
    """A process that reads a source that may block. It inherits the environment and nothing else."""

    def __init__(self, source: Source, host: Host, command: tuple[str, ...] | None = None) -> None:
        """Raises OSError if the process cannot be started."""
        self._source = source
        pids = ",".join(map(str, host.pids))
        module = (
            ("-P", "-m", __spec__.name) if sys.version_info >= (3, 11) else ("-m", __spec__.name)
        )
        self._process = subprocess.Popen(
            [*(command or (sys.executable, *module)), source.name, pids],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
        )

    def collect(self, timeout_s: float) -> tuple[tuple[Observation, ...], UnavailableSource | None]:
        """Waits for the result. A process that is late is killed, and hardly waited for: in a driver
        it may not end.
        """
        name = self._source.name
        try:
            output, _ = self._process.communicate(timeout=max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            self._abandon()
            reason = f"it did not answer within {TIME_LIMIT_S:g} seconds"
            blocked = Observation(
                source=name,
                about=name,
                what="does_not_return",
                now=f"{TIME_LIMIT_S:g} s",
                is_abnormal=True,
            )
            return (blocked,), UnavailableSource(source=name, reason=reason, remedy=_BLOCKED_REMEDY)
        try:
            return _decode_result(json.loads(output))
        except (ValueError, TypeError, KeyError):
            reason = f"its reader ended with status {self._process.returncode}"
            return (), UnavailableSource(source=name, reason=reason, remedy="please report this")

    def _abandon(self) -> None:
        self._process.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_KILL_WAIT_S)


def _decode_result(
    document: dict[str, Any],
) -> tuple[tuple[Observation, ...], UnavailableSource | None]:
    observations = tuple(
        Observation(**{**item, "weight": Weight(item.get("weight", Weight.HINT))})
        for item in document["observations"]
    )
    unavailable = document["unavailable"]
    return observations, UnavailableSource(**unavailable) if unavailable else None


def main(argv: list[str]) -> int:
    # A reader that is blocked must not outlive its node agent.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    name, pids = argv
    (source,) = [source for source in SOURCES if source.name == name]
    host = Host.from_environ(os.environ, tuple(int(pid) for pid in pids.split(",") if pid))
    observations, unavailable = read_source(source, host)
    document = {
        "observations": codec.encode_message(observations),
        "unavailable": codec.encode_message(unavailable),
    }
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
