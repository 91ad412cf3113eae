"""The kernel log: faults of GPUs and adapters, processes that were killed for memory, stuck tasks.

The format of a record is that of Documentation/ABI/testing/dev-kmsg.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hangwatch.model.hardware import Observation, Weight, XidAction, find_xid

from .host import Host, SourceUnavailableError

SOURCE = "kernel log"

MAX_AGE_S = 900.0  # older messages are not reported
MAX_MESSAGES = 32
_MAX_RECORD_BYTES = 8192
_MAX_LOG_BYTES = 16 << 20
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of the kernel's proc_ns.h
_REMEDY = "give the node agent CAP_SYSLOG (docker: --cap-add SYSLOG), or set sysctl kernel.dmesg_restrict=0"


@dataclass(frozen=True, slots=True)
class _Pattern:
    """``about`` and ``now`` are groups of the expression, or formats that contain them."""

    what: str
    expression: re.Pattern[str]
    about: str
    now: str = "{message}"  # what matched
    weight: Weight = Weight.FAULT


# Each expression is written from the format string in the kernel's or the driver's source.
_PATTERNS = (
    _Pattern(
        "xid",
        re.compile(
            r"NVRM: Xid \((?:PCI:)?(?P<bus_id>[^\s()]+)\): (?P<code>\d+)(?:, pid=(?P<pid>\d+))?.*"
        ),
        "GPU {bus_id}",
        "{code}",
    ),
    _Pattern(
        "oom_kill",
        re.compile(r"[Oo]ut of memory: Killed process (?P<pid>\d+) \((?P<name>[^)]*)\)"),
        "process {pid}",
        "{name}",
    ),
    _Pattern(
        "mlx5",
        re.compile(r"mlx5_core (?P<bus_id>[\da-f]+:[\da-f:]+\.\d).*(?:health|[Ff]atal|timeout).*"),
        "{bus_id}",
    ),
    _Pattern(
        "link_down",
        re.compile(r"(?P<port>[^\s:]+):?(?: NIC)? [Ll]ink(?: is)? [Dd]own"),
        "{port}",
    ),
    _Pattern(
        "nfs_not_responding",
        re.compile(r"\bnfs: server (?P<server>[^\s,]+) not responding.*"),
        "{server}",
    ),
    _Pattern(
        "hung_task",
        re.compile(r"\btask (?P<name>.+):(?P<pid>\d+) blocked for more than (?P<seconds>\d+) s"),
        "process {pid}",
        "{name}, for more than {seconds} s",
    ),
    _Pattern("io_error", re.compile(r"\bI/O error, dev (?P<device>[^\s,]+).*"), "{device}"),
    _Pattern(
        "pcie_error",
        re.compile(r"(?P<bus_id>\S+): (?:AER|PCIe Bus Error): .*(?:[Uu]ncorrect|Fatal).*"),
        "{bus_id}",
    ),
    _Pattern("machine_check", re.compile(r"\bmce: \[Hardware Error\].*"), "CPU"),
    _Pattern(
        "soft_lockup",
        re.compile(r"\bsoft lockup - (?P<core>CPU#\d+).*"),
        "{core}",
        weight=Weight.HINT,
    ),
)


def probe(host: Host) -> tuple[Observation, ...]:
    """The newest messages that explain hangs. Raises SourceUnavailableError without the log."""
    path, log = host.kernel_log, b""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with open(fd, "rb", buffering=0) as records:
            while len(log) < _MAX_LOG_BYTES:
                try:
                    record = records.read(_MAX_RECORD_BYTES)
                except BrokenPipeError:  # the next record was overwritten meanwhile
                    continue
                if not record:  # the log ends here
                    break
                log += record
    except PermissionError:
        raise SourceUnavailableError(f"{path} may not be read", _REMEDY) from None
    except OSError as error:
        reason = f"{path} cannot be read: {error.strerror}"
        raise SourceUnavailableError(reason, f"mount {path} into the container") from None
    now_s = host.uptime_s()
    found = []
    for line in log.decode(errors="replace").splitlines():
        head, separator, message = line.partition(";")
        fields = head.split(",")  # priority, sequence number, microseconds since the host started
        if not separator or len(fields) < 3 or not fields[2].isdigit():
            continue
        age_s = now_s - int(fields[2]) / 1e6
        if age_s > MAX_AGE_S:
            continue
        for pattern in _PATTERNS:
            match = pattern.expression.search(message)
            if match is not None:
                groups = {"message": match[0], **match.groupdict("")}
                observation = Observation(
                    source=SOURCE,
                    about=pattern.about.format(**groups),
                    what=pattern.what,
                    now=pattern.now.format(**groups)[:200],
                    weight=pattern.weight,
                    is_abnormal=True,
                    age_s=round(max(0.0, age_s), 1),
                )
                if pattern.what == "xid":
                    observation = _attribute_xid(observation, groups, host)
                found.append(observation)
                break
    return tuple(found[-MAX_MESSAGES:])


def _attribute_xid(observation: Observation, groups: Mapping[str, str], host: Host) -> Observation:
    """An Xid that programs cause belongs to the process that the message names. Where that is unknown,
    as in a container, whose process IDs are not the kernel's, and where nothing is to be done about
    the Xid, it is only a hint.
    """
    xid = find_xid(observation.now)
    if xid is None or xid.action not in (XidAction.CHECK_PROGRAM, XidAction.NONE):
        return observation
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink(host.proc / "self/ns/pid")
    has_kernel_pids = namespace == _INITIAL_PID_NAMESPACE  # process IDs here are those of the log
    if xid.action is XidAction.CHECK_PROGRAM and groups["pid"] and has_kernel_pids:
        return replace(
            observation,
            what="program_xid",
            about=f"process {groups['pid']}",
            now=f"{observation.now} on {observation.about}",
        )
    return replace(observation, weight=Weight.HINT)
