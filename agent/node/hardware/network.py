"""The network: the ports of InfiniBand and RoCE adapters, the interfaces that a job uses, and TCP.

Counters of congestion control, which grow on healthy networks as well, are left out. The names of a
port's counters are those of Documentation/ABI/stable/sysfs-class-infiniband and of mlx5.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator

from hangwatch.model.hardware import Observation, Weight

from ..system.processes import read_text
from .host import Host, SourceUnavailableError, list_names, observe, read_counters

INFINIBAND = "infiniband"
INTERFACES = "network"

_PORT_FAULTS = ("link_downed",)
_PORT_HINTS = (
    "symbol_error",
    "link_error_recovery",
    "port_rcv_errors",
    "port_rcv_remote_physical_errors",
    "port_xmit_discards",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)
_PORT_HW_HINTS = (
    "duplicate_request",
    "implied_nak_seq_err",
    "local_ack_timeout_err",
    "out_of_buffer",
    "out_of_sequence",
    "packet_seq_err",
    "req_cqe_error",
    "req_transport_retries_exceeded",
    "resp_cqe_error",
    "rnr_nak_retry_err",
    "roce_adp_retrans",
    "roce_adp_retrans_to",
    "roce_slow_restart",
    "rx_icrc_encapsulated",
)
_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_ERRORS = (
    "rx_errors",
    "tx_errors",
    "rx_dropped",
    "tx_dropped",
    "rx_crc_errors",
    "tx_carrier_errors",
    "rx_missed_errors",
)
_TCP_COUNTERS = ("RetransSegs", "TCPTimeouts", "TCPAbortOnTimeout")  # no protocol shares a name
_ROUTE_UP = 0x1  # RTF_UP


def check_infiniband(host: Host) -> None:
    """Raises SourceUnavailableError if there is no adapter."""
    if not list_names(host.sys / "class/infiniband"):
        raise SourceUnavailableError("this host has no InfiniBand or RoCE adapter")


def probe_infiniband(host: Host) -> Iterator[Observation]:
    """The ports of all adapters. Raises SourceUnavailableError if there are none."""
    check_infiniband(host)
    for port in sorted((host.sys / "class/infiniband").glob("*/ports/*")):
        about = f"{port.parts[-3]}/{port.name}"
        # Only a change of state means something, since the job uses no port that was down before it.
        for what in ("state", "phys_state"):
            state = read_text(port / what)
            if state:
                name = state.partition(":")[2].strip() or state  # "4: ACTIVE"
                yield observe(INFINIBAND, about, what, name, Weight.FAULT)
        rate = read_text(port / "rate")
        if rate:
            yield observe(INFINIBAND, about, "rate", rate, Weight.FACT)
        yield from read_counters(INFINIBAND, about, port / "counters", _PORT_FAULTS, Weight.FAULT)
        yield from read_counters(INFINIBAND, about, port / "counters", _PORT_HINTS)
        yield from read_counters(INFINIBAND, about, port / "hw_counters", _PORT_HW_HINTS)


def probe_interfaces(host: Host) -> Iterator[Observation]:
    """The job's interfaces, and TCP. Raises SourceUnavailableError without /sys/class/net."""
    names = list_names(host.sys / "class/net")
    if not names:
        raise SourceUnavailableError(
            "/sys/class/net cannot be read", "mount /sys into the container"
        )
    # A line of names and a line of values for each protocol
    lines = read_text(host.proc / "net/snmp").splitlines()
    lines += read_text(host.proc / "net/netstat").splitlines()
    for names_line, values_line in zip(lines[::2], lines[1::2], strict=False):
        for name, value in zip(names_line.split(), values_line.split(), strict=False):
            if name in _TCP_COUNTERS:
                yield observe(INTERFACES, "TCP", name, int(value), is_counter=True)
    for name in choose_interfaces(host, names):
        folder = host.sys / "class/net" / name
        state = read_text(folder / "operstate")
        if state and state != "unknown":  # loopback and tunnels
            yield observe(INTERFACES, name, "state", state, Weight.FAULT)
        yield from read_counters(INTERFACES, name, folder, ("carrier_down_count",), Weight.FAULT)
        yield from read_counters(INTERFACES, name, folder / "statistics", _ERRORS)


def choose_interfaces(host: Host, names: list[str]) -> list[str]:
    """The interfaces that NCCL's or Gloo's variable selects; else the one on the route to the master;
    else all that are up. Loopback is among them only if a variable selects it.
    """
    for variable in _VARIABLES:
        # NCCL's notation: prefixes, after "^" those to leave out, after "=" exact names
        selection = host.environ.get(variable, "")
        prefixes = selection.removeprefix("^").removeprefix("=").split(",")
        parts = tuple(part.partition(":")[0] for part in prefixes if part)
        if selection.removeprefix("^").startswith("="):
            selected = [name for name in names if name in parts]
        else:
            selected = [name for name in names if name.startswith(parts)]
        if parts and selection.startswith("^"):
            selected = [name for name in names if name not in selected and name != "lo"]
        if selected:
            return selected
    longest, routed = -1, ""
    with contextlib.suppress(OSError):  # the address is a name, and to resolve it could block
        (target,) = struct.unpack("<I", socket.inet_aton(host.environ.get("MASTER_ADDR", "")))
        for line in read_text(host.proc / "net/route").splitlines()[1:]:
            fields = line.split()
            if len(fields) < 8:
                continue
            network, flags, mask = (int(fields[column], 16) for column in (1, 3, 7))
            length = mask.bit_count()
            if flags & _ROUTE_UP and target & mask == network and length > longest:
                longest, routed = length, fields[0]
    if routed in names and routed != "lo":
        return [routed]
    folder = host.sys / "class/net"
    return [
        name for name in names if name != "lo" and read_text(folder / name / "operstate") == "up"
    ]
