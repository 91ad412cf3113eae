"""The sources of a host, and how they are read. A new source is a function that takes a `Host`, and
an entry in `SOURCES`.

Sources that a driver or the network may block are read in a process that can be abandoned: this
module, as a program. Each line of its input is a request: ``{"pids": [...], "sources": [NAME, ...]}``.
It prints the result of each source as a line of JSON, as soon as it has it, and ends with its input.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from hangwatch.model.hardware import Observation, UnavailableSource, Weight

from . import host_resources, kernel_log, nccl_diagnostics, nccl_ras, network, nvml
from .host import Host, SourceUnavailableError, observe

TIME_LIMIT_S = 5.0
_KILL_WAIT_S = 0.5
_END_WAIT_S = 0.2  # a process that has closed its output ends within this time
_READ_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1
_SAFE_PATH = ("-P",) if sys.version_info >= (3, 11) else ()
_COMMAND = (sys.executable, *_SAFE_PATH, "-m", __name__)
_BLOCKED_REMEDY = (
    "its driver or device may be blocked: see /proc/PID/stack of the reader, and the kernel log"
)

Probe = Callable[[Host], Iterable[Observation]]
SourceResult = tuple[tuple[Observation, ...], UnavailableSource | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A source of evidence. ``probe`` raises SourceUnavailableError where the source cannot be read,
    and ``check`` where that can be said without reading it.
    """

    name: str
    probe: Probe
    has_counters: bool = False  # such a source is also read once a minute, to know what changes
    may_block: bool = False  # a driver or network may block the probe
    examines_job: bool = False  # it makes all ranks of the job work, so one host reads it for all
    check: Callable[[Host], None] = lambda host: None


SOURCES = (
    Source(
        name=network.INFINIBAND,
        probe=network.probe_infiniband,
        has_counters=True,
        may_block=True,
        check=network.check_infiniband,
    ),
    Source(name=network.INTERFACES, probe=network.probe_interfaces, has_counters=True),
    Source(name=nvml.SOURCE, probe=nvml.probe, has_counters=True, may_block=True, check=nvml.check),
    Source(name=nccl_ras.SOURCE, probe=nccl_ras.probe, may_block=True, check=nccl_ras.check),
    Source(
        name=nccl_diagnostics.SOURCE,
        probe=nccl_diagnostics.probe,
        may_block=True,
        examines_job=True,
        check=nccl_diagnostics.check,
    ),
    Source(name=kernel_log.SOURCE, probe=kernel_log.probe),
    Source(name=host_resources.CGROUPS, probe=host_resources.probe_cgroups, has_counters=True),
    Source(name=host_resources.PRESSURE, probe=host_resources.probe_pressure),
    Source(name=host_resources.STORAGE, probe=host_resources.probe_storage),
    Source(name=host_resources.VERSIONS, probe=host_resources.probe_versions),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The results of the sources at one time, on the clock of `time.monotonic_ns`."""

    taken_ns: int
    observations: tuple[Observation, ...] = ()
    unavailable: tuple[UnavailableSource, ...] = ()


@dataclass(slots=True)
class ReaderProcess:
    """Reads sources, and has a process for those that may block, which reads them all at the same
    time. The process inherits the environment and nothing else, and is kept for later readings, since
    starting one takes more than most readings do.
    """

    command: tuple[str, ...] = _COMMAND
    _process: subprocess.Popen[bytes] | None = None
    _names: list[str] = field(default_factory=list)

    def read_sources(self, sources: Sequence[Source], host: Host) -> Reading:
        """Reads these sources. Those that may block have one time limit together."""
        give_up_at = time.monotonic() + TIME_LIMIT_S
        results: list[SourceResult] = []
        blocking = []
        for source in sources:
            if source.may_block:
                try:
                    source.check(host)
                    blocking.append(source)
                except SourceUnavailableError as error:
                    results.append(((), error.describe(source.name)))
        try:
            self.start_reading(blocking, host)
        except OSError as error:
            reason = f"its reader cannot be started: {error.strerror}"
            for source in blocking:
                results.append(((), UnavailableSource(source=source.name, reason=reason)))
        results += [run_probe(source, host) for source in sources if not source.may_block]
        taken_ns = time.monotonic_ns()
        results += self.collect(give_up_at - time.monotonic())
        return Reading(
            taken_ns=taken_ns,
            observations=tuple(item for observed, _ in results for item in observed),
            unavailable=tuple(missing for _, missing in results if missing is not None),
        )

    def start_reading(self, sources: Sequence[Source], host: Host) -> None:
        """Starts to read these sources; `collect` must follow. Raises OSError if the process cannot
        be started: then there is nothing to collect.
        """
        self._names = []
        if not sources:
            return
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                bufsize=0,
            )
        assert self._process.stdin is not None
        self._names = [source.name for source in sources]
        request = json.dumps({"pids": host.pids, "sources": self._names})
        with contextlib.suppress(BrokenPipeError):  # the process has ended, which `collect` reports
            self._process.stdin.write(f"{request}\n".encode())

    def collect(self, timeout_s: float) -> list[SourceResult]:
        """Waits for the results, one of each source in their order. A process that is late is killed,
        and hardly waited for, since one that is blocked in a driver may not end.
        """
        results: dict[str, SourceResult] = {}
        give_up_at = time.monotonic() + timeout_s
        unfinished = b""
        while len(results) < len(self._names):
            assert self._process is not None and self._process.stdout is not None
            output, data = self._process.stdout.fileno(), b""
            if select.select([output], [], [], max(0.0, give_up_at - time.monotonic()))[0]:
                data = os.read(output, _READ_BYTES)
            if not data:  # it is late, or has ended
                break
            *lines, unfinished = (unfinished + data).split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    document = json.loads(line)
                    observed = []
                    for item in document["observations"]:
                        observation = Observation(**item)
                        weight = Weight(observation.weight)
                        observed.append(dataclasses.replace(observation, weight=weight))
                    missing = document["unavailable"]
                    unavailable = UnavailableSource(**missing) if missing else None
                    results[document["source"]] = tuple(observed), unavailable
        is_late = time.monotonic() >= give_up_at
        status = None
        if len(results) < len(self._names):
            assert self._process is not None
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_END_WAIT_S)
            status = self._process.returncode  # None if it did not end by itself
            self.close()
        for name in self._names:
            if name in results:
                continue
            if is_late:
                limit = f"{TIME_LIMIT_S:g} s"
                observation = observe(name, name, "does_not_return", limit, is_abnormal=True)
                reason = f"it did not answer within {TIME_LIMIT_S:g} seconds"
                unavailable = UnavailableSource(source=name, reason=reason, remedy=_BLOCKED_REMEDY)
                results[name] = (observation,), unavailable
            else:
                reason = f"its reader ended with status {status}"
                unavailable = UnavailableSource(
                    source=name, reason=reason, remedy="please report this"
                )
                results[name] = (), unavailable
        return [results[name] for name in self._names]

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_KILL_WAIT_S)


def run_probe(source: Source, host: Host) -> SourceResult:
    """Reads a source here. Whatever goes wrong with it is returned, not raised."""
    try:
        return tuple(source.probe(host)), None
    except SourceUnavailableError as error:
        return (), error.describe(source.name)
    except Exception as error:  # the files of an unknown kernel or driver
        reason = f"hangwatch failed to read it: {type(error).__name__}: {error}"
        return (), UnavailableSource(source=source.name, reason=reason, remedy="please report this")


def main() -> None:
    from concurrent.futures import ThreadPoolExecutor, as_completed  # only this process needs it

    # A reader that is blocked must not outlive its node agent.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with ThreadPoolExecutor(len(SOURCES)) as pool:
        for line in sys.stdin:
            request = json.loads(line)
            host = Host.from_environ(tuple(request["pids"]))
            requested = [source for source in SOURCES if source.name in request["sources"]]
            names = {pool.submit(run_probe, source, host): source.name for source in requested}
            for future in as_completed(names):
                observations, unavailable = future.result()
                result = {
                    "source": names[future],
                    "observations": [dataclasses.asdict(item) for item in observations],
                    "unavailable": dataclasses.asdict(unavailable) if unavailable else None,
                }
                print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
