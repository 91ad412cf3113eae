"""NCCL's own diagnostics of a job, from NCCL 2.31 on: memory errors, NVLinks, Xids, variables and
versions that differ between the ranks of a communicator.

NCCL examines nothing until it is asked, and then in all processes of the job at once: their RAS threads
query NVML, read the kernel log and, from 2.32 on, start ``lspci`` and ``rdma_topo``. A GPU that does not
answer holds up the RAS thread of its process, and each Xid is reported once, to whoever asks first. So
a job must allow it, by HANGWATCH_NCCL_DIAGNOSTICS=1, and one host of it asks for all.

The protocol is that of src/ras/client_support.cc, and the lines are those of src/ras/diagnostics*.cc,
at 2.31.2 and 2.32.3.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator, Sequence

from hangwatch.model.hardware import JOB_DIAGNOSTICS, Observation, Weight, XidAction, find_xid

from . import nccl_ras
from .host import Host, SourceUnavailableError, observe

SOURCE = JOB_DIAGNOSTICS
VARIABLE = "HANGWATCH_NCCL_DIAGNOSTICS"

ANSWER_TIMEOUT_S = 4.0
# NCCL waits two seconds for processes that do not answer, and then reports on the others.
_COMMANDS = b"client protocol 2\ntimeout 2\ndiagnostics\n"
_GREETING = b"SERVER PROTOCOL"
_MAX_REPORT_BYTES = 1 << 20
_MAX_LINE_CHARS = 2048
_READ_BYTES = 1 << 16
_MAX_FINDINGS = 32
_MAX_VALUES_SHOWN = 4  # of one variable
_COMPLETED = b"NCCL DIAG RAS diagnostics completed"
_UNKNOWN_COMMAND = b"ERROR: Unknown command"
_REFUSALS = (b"ERROR", b"BUSY")
_FINDING = re.compile(r"\S+ NCCL DIAG \[INFO\] +(.+)")
# What NCCL could not examine is no finding.
_MISSING = re.compile(
    r"unavailable|incomplete|inaccessible|unable to|truncated|no kernel-log source|root access"
)
_VARIABLE = re.compile(r"NCCL environment: (NCCL_[^=\s]*)=(.*) on rank\(s\) (\{.*)")
_VARIABLE_SUMMARY = "NCCL environment: "
_RANKS = r"on rank\(s\) (?P<ranks>\{[^}]*\}(?: \(N=(?P<count>\d+)\))?)"
_ECC = re.compile(
    rf"ECC: uncorrected volatile errors {_RANKS} \(worst=(?P<worst>\d+)\).* in comm (?P<comm>\w+)"
)
_NVLINK = re.compile(
    rf"NVLink: inactive link\(s\) {_RANKS} across (?P<size>\d+) ranks in comm (?P<comm>\w+)"
)
_XID = re.compile(r"Xid (\d+) detected .*? on host ([^\s.]+(?:\.[^\s.]+)*)")
_SXID = re.compile(r"SXid (\d+) detected .*?reported ([\w-]+), .*? on host ([^\s.]+(?:\.[^\s.]+)*)")
# After these, the GPU completes nothing, or its links may not.
_FATAL_ACTIONS = (XidAction.RESET_GPU, XidAction.RESTART_NODE, XidAction.CHECK_NVLINK)


def check(host: Host) -> None:
    """Raises SourceUnavailableError if the job does not allow it, or no process of it listens."""
    _check_permission(host)
    nccl_ras.check(host)


def probe(host: Host) -> tuple[Observation, ...]:
    """Has NCCL examine the job. Raises SourceUnavailableError without an answer."""
    _check_permission(host)
    address = nccl_ras.get_address(host)
    try:
        with nccl_ras.connect(host, address) as server:
            report = _request_report(server)
    except OSError as error:
        raise nccl_ras.describe_failure(address, error) from None
    if not report.startswith(_GREETING):
        raise SourceUnavailableError(f"what listens at {address} is not NCCL")
    last_line = _get_last_line(report)
    if last_line.startswith(_UNKNOWN_COMMAND):
        raise SourceUnavailableError(f"NCCL at {address} is older than 2.31")
    if last_line.startswith(_REFUSALS):
        answer = last_line[:100].decode(errors="replace")
        raise SourceUnavailableError(f"NCCL at {address}: {answer}")
    if _COMPLETED not in last_line:
        raise SourceUnavailableError(f"NCCL at {address}: its report has no end")
    return tuple(_read_findings(report.decode(errors="replace").splitlines()))


def _check_permission(host: Host) -> None:
    if host.environ.get(VARIABLE) != "1":
        raise SourceUnavailableError(f"{VARIABLE}=1 is not set")


def _request_report(server: socket.socket) -> bytes:
    """Everything up to the end of the report. Raises TimeoutError if it is late, however little of it
    arrives at a time.
    """
    give_up_at = time.monotonic() + ANSWER_TIMEOUT_S
    server.settimeout(ANSWER_TIMEOUT_S)
    server.sendall(_COMMANDS)
    report = b""
    while len(report) < _MAX_REPORT_BYTES:
        remaining_s = give_up_at - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        server.settimeout(remaining_s)
        data = server.recv(_READ_BYTES)
        report += data
        is_nccl = report.startswith(_GREETING[: len(report)])
        # NCCL keeps the connection after a command that it does not know.
        last_line = _get_last_line(report)
        has_ended = _COMPLETED in last_line or last_line.startswith(_REFUSALS)
        if not data or has_ended or not is_nccl:
            break
    return report


def _get_last_line(report: bytes) -> bytes:
    """The last line that is complete."""
    return report.rpartition(b"\n")[0].rpartition(b"\n")[2]


def _read_findings(lines: Sequence[str]) -> Iterator[Observation]:
    matches = [_FINDING.match(line[:_MAX_LINE_CHARS]) for line in lines]
    findings = [match[1] for match in matches if match is not None]
    texts = list(dict.fromkeys(text for text in findings if _MISSING.search(text) is None))
    yield from _read_variables(texts)
    others = [text for text in texts if not text.startswith(_VARIABLE_SUMMARY)]
    observed = [
        _read_event(text) or _read_rank_finding(text) or _read_other(text) for text in others
    ]
    observed.sort(key=lambda observation: observation.weight is not Weight.FAULT)
    yield from observed[:_MAX_FINDINGS]


def _read_variables(texts: Sequence[str]) -> Iterator[Observation]:
    """The variables that are not the same on all ranks, with the ranks that have each value."""
    values: dict[str, dict[str, None]] = {}
    for match in map(_VARIABLE.match, texts):
        if match is not None:
            name, value, ranks = match.groups()
            values.setdefault(name, {})[f"{value[:60]} on ranks {ranks}"] = None
    for name, parts in list(values.items())[:_MAX_FINDINGS]:
        more = len(parts) - _MAX_VALUES_SHOWN
        shown = "; ".join(list(parts)[:_MAX_VALUES_SHOWN]) + (f"; and {more} more" * (more > 0))
        yield _make_observation(name, "differs_between_ranks", shown, Weight.HINT)


def _read_event(text: str) -> Observation | None:
    """An Xid or SXid. NCCL reports those since it was started or was last asked, without their time."""
    if (match := _SXID.match(text)) is not None:
        code, severity, host = match.groups()
        weight = Weight.FAULT if severity == "Fatal" else Weight.HINT
        return _make_observation(f"host {host}", "sxid", f"{code} ({severity.lower()})", weight)
    if (match := _XID.match(text)) is None:
        return None
    code, host = match.groups()
    xid = find_xid(code)
    is_fatal = xid is not None and xid.action in _FATAL_ACTIONS
    return _make_observation(
        f"host {host}", "earlier_xid", code, Weight.FAULT if is_fatal else Weight.HINT
    )


def _read_rank_finding(text: str) -> Observation | None:
    """Errors of the memory or the links of some ranks' GPUs."""
    match = _ECC.match(text) or _NVLINK.match(text)
    if match is None:
        return None
    about = f"ranks {match['ranks']} of communicator {match['comm']}"
    if match.re is _ECC:
        what, now = "memory_errors_since_boot", f"up to {match['worst']}"
        return _make_observation(about, what, now, Weight.FAULT)
    # Where no GPU uses its NVLinks, none of them needs to be active.
    count = int(match["count"] or match["ranks"].count(",") + 1)
    weight = Weight.FAULT if count < int(match["size"]) else Weight.HINT
    return _make_observation(about, "inactive_nvlinks", f"{count} of {match['size']}", weight)


def _read_other(text: str) -> Observation:
    """Any other finding, such as a version that differs, by the name of the check."""
    check_name, separator, finding = text.partition(": ")
    if not separator:
        check_name, finding = "job", text
    return _make_observation(check_name[:60], "nccl_finding", finding, Weight.HINT)


def _make_observation(about: str, what: str, now: str, weight: Weight) -> Observation:
    return observe(SOURCE, about, what, now[:200], weight, is_abnormal=True)
