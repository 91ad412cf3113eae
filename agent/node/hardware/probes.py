"""Reads sources that may block, in a process that can be abandoned if a driver does not return:
``python -P -m hangwatch.agent.node.hardware.probes``.

Each line of its input is a request: ``{"pids": [...], "sources": {NAME: MODULE, ...}}``. The process
prints the result of each source as a line of JSON, as soon as it has it, and ends with its input. It
loads only the modules of the sources that are requested.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable

from hangwatch.model.hardware import Observation, UnavailableSource

from .host import Host, SourceUnavailableError

SourceResult = tuple[tuple[Observation, ...], UnavailableSource | None]

_PR_SET_PDEATHSIG = 1


def run_probe(
    name: str, probe: Callable[[Host], tuple[Observation, ...]], host: Host
) -> SourceResult:
    """Reads the source ``name`` here. Whatever goes wrong with it is returned, not raised."""
    try:
        return probe(host), None
    except SourceUnavailableError as error:
        return (), error.describe(name)
    except Exception as error:  # the files of an unknown kernel or driver
        reason = f"hangwatch failed to read it: {type(error).__name__}: {error}"
        return (), UnavailableSource(source=name, reason=reason, remedy="please report this")


def print_result(name: str, module: str, host: Host, printing: threading.Lock) -> None:
    """Reads a source and prints its line."""
    probe = importlib.import_module(module).probe
    observations, unavailable = run_probe(name, probe, host)
    line = json.dumps(
        {
            "source": name,
            "observations": [dataclasses.asdict(observation) for observation in observations],
            "unavailable": dataclasses.asdict(unavailable) if unavailable else None,
        }
    )
    with printing:  # lines longer than PIPE_BUF would be interleaved
        print(line, flush=True)


def main() -> int:
    # A reader that is blocked must not outlive its node agent.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    printing = threading.Lock()
    for line in sys.stdin:
        request = json.loads(line)
        host = Host.from_environ(os.environ, tuple(request["pids"]))
        threads = [
            threading.Thread(target=print_result, args=(name, module, host, printing))
            for name, module in request["sources"].items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
