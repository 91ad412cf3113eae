"""NCCL's own report on the health of its communicators, including those that torch does not know: its
RAS subsystem listens on localhost:28028, or at NCCL_RAS_ADDR.

The protocol and both formats are those of src/ras/client_support.cc; JSON from NCCL 2.28.7 on.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from hangwatch.model.hardware import JOB_SOURCE, Observation, Weight

from ..system.processes import read_text
from .host import Host, SourceUnavailableError, observe

SOURCE = JOB_SOURCE

DEFAULT_ADDRESS = "localhost:28028"
CONNECT_TIMEOUT_S = 1.0
QUERY_TIMEOUT_S = 4.0  # NCCL waits two seconds for processes that do not answer
_MAX_REPORT_BYTES = 8 << 20
_MAX_RANKS_SHOWN = 16
_LISTENING = "0A"  # TCP_LISTEN in include/net/tcp_states.h
# The place of a missing comma between two members of an object. NCCL 2.28.9 prints one member a
# line, and no comma after the first member of an element of missing_ranks.
_MISSING_COMMA = re.compile(r'(?<=[^\s,:{\[])(?=\s*\n\s*")')
_TITLE = re.compile(r"^(?:#(\S+) \((\w+)\) )?(INCOMPLETE|DEAD|MISMATCH|TIMEOUT)$")
_NO_SERVER = "no process of the job listens at {}: NCCL is older than 2.24, or NCCL_RAS_ENABLE=0"


def check(host: Host) -> None:
    """Raises SourceUnavailableError if no process of this job listens at the address of RAS."""
    connect(host, get_address(host)).close()


def probe(host: Host) -> tuple[Observation, ...]:
    """Ranks that are missing, lag or failed. Raises SourceUnavailableError without an answer."""
    address = get_address(host)
    try:
        with connect(host, address) as server, server.makefile("rwb") as stream:
            server.settimeout(QUERY_TIMEOUT_S)
            stream.write(b"client protocol 2\n")
            stream.flush()
            if not stream.readline(200).startswith(b"SERVER PROTOCOL"):
                raise SourceUnavailableError(f"what listens at {address} is not NCCL")
            # An older NCCL answers this line with an error, and sends its report as text.
            stream.write(b"set format json\n")
            stream.flush()
            stream.readline(200)
            stream.write(b"verbose status\n")
            stream.flush()
            report = stream.read(_MAX_REPORT_BYTES).decode(errors="replace")
    except OSError as error:
        raise describe_failure(address, error) from None
    is_json = report.lstrip().startswith("{")
    return tuple(_read_json(report) if is_json else _read_text(report))


def get_address(host: Host) -> str:
    """The HOST:PORT at which NCCL listens."""
    return host.environ.get("NCCL_RAS_ADDR") or DEFAULT_ADDRESS


def describe_failure(address: str, error: OSError) -> SourceUnavailableError:
    """The reason why a connection to NCCL gave no report."""
    reason = "did not answer in time" if isinstance(error, TimeoutError) else str(error)
    return SourceUnavailableError(f"NCCL at {address}: {reason}")


def connect(host: Host, address: str) -> socket.socket:
    """Connects to NCCL. Raises SourceUnavailableError if no process of this job listens there."""
    name, _, port = address.rpartition(":")
    if not (name and port.isdecimal()):
        raise SourceUnavailableError(
            f"NCCL_RAS_ADDR={address} is no address", "set it to HOST:PORT"
        )
    _check_owner(host, address, int(port))
    try:
        return socket.create_connection((name.strip("[]"), int(port)), CONNECT_TIMEOUT_S)
    except OSError:
        raise SourceUnavailableError(_NO_SERVER.format(address)) from None


def _check_owner(host: Host, address: str, port: int) -> None:
    """Raises SourceUnavailableError if it is the process of another job that listens there."""
    sockets = set()  # as in /proc/PID/fd
    for name in ("tcp", "tcp6"):
        # The columns are those of proc_pid_net(5).
        for line in read_text(host.proc / "net" / name).splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == _LISTENING and int(local.rpartition(":")[2], 16) == port:
                sockets.add(f"socket:[{rest[5]}]")
    if not sockets or not host.pids:
        return  # the listener is on another host, or this node agent watches no job
    for pid in host.pids:
        folder = host.proc / str(pid) / "fd"
        try:
            names = os.listdir(folder)
        except PermissionError:
            return  # the owner of the socket stays unknown
        except OSError:  # the process has ended
            continue
        for name in names:
            with contextlib.suppress(OSError):  # the descriptor was closed meanwhile
                if os.readlink(folder / name) in sockets:
                    return
    raise SourceUnavailableError(
        f"another job's process listens at {address}",
        "set NCCL_RAS_ADDR=localhost:PORT to another port for one of the jobs",
    )


def _read_json(report: str) -> Iterator[Observation]:
    for text in (report, _MISSING_COMMA.sub(",", report)):
        with contextlib.suppress(ValueError):
            document = json.loads(text)
            break
    else:
        raise SourceUnavailableError("NCCL's report is not valid JSON")
    version = document.get("nccl_version")
    if isinstance(version, str):
        yield observe(SOURCE, "nccl", "version", version, Weight.FACT)
    for communicator in document.get("communicators") or ():
        about = f"communicator {communicator.get('hash', '?')}"
        for missing in (communicator.get("missing_ranks") or ())[:_MAX_RANKS_SHOWN]:
            is_dead = (missing.get("status") or {}).get("considered_dead")
            what = "considered_dead" if is_dead else "does_not_answer"
            yield _make_observation(about, what, _describe_rank(missing))
        ranks = communicator.get("ranks") or ()
        for rank in ranks:
            error = (rank.get("status") or {}).get("async_error")
            if error:
                yield _make_observation(about, "async_error", f"{_describe_rank(rank)}: {error}")
        # In a healthy job, too, some ranks have begun fewer collectives of a kind for a moment.
        counts_by_rank = [rank.get("collective_counts") or {} for rank in ranks]
        for op in sorted(set().union(*counts_by_rank)):
            counts = [counts.get(op, 0) for counts in counts_by_rank]
            ((usual, _),) = Counter(counts).most_common(1)
            lagging = [(rank, n) for rank, n in zip(ranks, counts, strict=True) if n < usual]
            for rank, count in lagging[:_MAX_RANKS_SHOWN]:
                text = f"{_describe_rank(rank)}: {count} of {usual} {op}"
                yield _make_observation(about, "lags", text, Weight.HINT)


def _describe_rank(rank: Mapping[str, Any]) -> str:
    text = f"rank {rank.get('rank', '?')}"
    if "pid" in rank:
        text += (
            f", process {rank['pid']} on {rank.get('host', '?')}, GPU {rank.get('nvml_dev', '?')}"
        )
    return text


def _make_observation(
    about: str, what: str, now: str, weight: Weight = Weight.FAULT
) -> Observation:
    return observe(SOURCE, about, what, now[:200], weight, is_abnormal=True)


def _read_text(report: str) -> Iterator[Observation]:
    """The paragraphs of "Errors" and "Warnings"; each begins with a title, and is indented."""
    version = re.search(r"NCCL version (\d[\w.]*)", report)
    if version is not None:
        yield observe(SOURCE, "nccl", "version", version[1], Weight.FACT)
    weight = Weight.HINT
    for paragraph in re.split(r"\n\s*\n", report):
        title, *lines = paragraph.strip("\n").splitlines() or [""]
        if title in ("Errors", "Warnings"):
            weight = Weight.FAULT if title == "Errors" else Weight.HINT
        match = _TITLE.match(title)
        if match is not None:
            about = f"communicator {match[2]}" if match[2] else "job"
            text = "; ".join(line.strip() for line in lines)
            yield _make_observation(about, match[3].lower(), text, weight)
