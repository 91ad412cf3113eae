"""The network interface that a job uses, and TCP's retransmissions."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from hangwatch.model.hardware import Observation, Weight

from .host import Host, SourceUnavailableError, list_names, observe, read_counters, read_text

SOURCE = "network"

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
_TCP_COUNTERS = {"Tcp": ("RetransSegs",), "TcpExt": ("TCPTimeouts", "TCPAbortOnTimeout")}
_ROUTE_UP = 0x1  # RTF_UP


def probe(host: Host) -> tuple[Observation, ...]:
    """The interfaces that the job uses, and TCP of this network namespace. Raises
    SourceUnavailableError if /sys/class/net cannot be read.
    """
    names = list_names(host.sys / "class" / "net")
    if not names:
        raise SourceUnavailableError(
            "/sys/class/net cannot be read", "mount /sys into the container"
        )
    counters = _parse_counters(read_text(host.proc / "net" / "snmp") or "")
    counters |= _parse_counters(read_text(host.proc / "net" / "netstat") or "")
    observations: list[Observation] = []
    for protocol, counter_names in _TCP_COUNTERS.items():
        for name in counter_names:
            value = counters.get(protocol, {}).get(name)
            if value is not None:
                observations.append(observe(SOURCE, "TCP", name, value, is_counter=True))
    for name in choose_interfaces(host, names):
        observations += _read_interface(name, host.sys / "class" / "net" / name)
    return tuple(observations)


def choose_interfaces(host: Host, names: list[str]) -> list[str]:
    """The interfaces that NCCL's or Gloo's variable selects; else the one on the route to the master;
    else all that are up. Loopback is among them only if a variable selects it.
    """
    for variable in _VARIABLES:
        if chosen := _select_names(host.environ.get(variable, ""), names):
            return chosen
    routed = _find_route(host.proc, host.environ.get("MASTER_ADDR", ""))
    if routed in names and routed != "lo":
        return [routed]
    folder = host.sys / "class" / "net"
    return [
        name for name in names if name != "lo" and read_text(folder / name / "operstate") == "up"
    ]


def _select_names(selection: str, names: list[str]) -> list[str]:
    """The names that match a selection in NCCL's notation: prefixes separated by commas, after "^"
    those to leave out, after "=" exact names.
    """
    inverts, selection = selection.startswith("^"), selection.removeprefix("^")
    is_exact, selection = selection.startswith("="), selection.removeprefix("=")
    parts = [part.partition(":")[0] for part in selection.split(",") if part]
    if not parts:
        return []

    def is_selected(name: str) -> bool:
        return any(name == part if is_exact else name.startswith(part) for part in parts)

    chosen = [name for name in names if is_selected(name) != inverts]
    return [name for name in chosen if name != "lo"] if inverts else chosen


def _find_route(proc: Path, address: str) -> str:
    """The interface on the route to an IPv4 address, by /proc/net/route; empty if it is not known."""
    try:
        (target,) = struct.unpack("<I", socket.inet_aton(address))
    except OSError:  # the address is a name, and to resolve it could block
        return ""
    best_mask, best_name = -1, ""
    for line in (read_text(proc / "net" / "route") or "").splitlines()[1:]:
        fields = line.split()
        if len(fields) < 8:
            continue
        network, flags, mask = int(fields[1], 16), int(fields[3], 16), int(fields[7], 16)
        length = mask.bit_count()
        if flags & _ROUTE_UP and target & mask == network and length > best_mask:
            best_mask, best_name = length, fields[0]
    return best_name


def _read_interface(name: str, folder: Path) -> Iterator[Observation]:
    state = read_text(folder / "operstate")
    if state and state != "unknown":  # loopback and tunnels
        yield observe(SOURCE, name, "state", state, Weight.FAULT)
    yield from read_counters(SOURCE, name, folder, ("carrier_down_count",), Weight.FAULT)
    yield from read_counters(SOURCE, name, folder / "statistics", _ERRORS)


def _parse_counters(text: str) -> dict[str, Mapping[str, int]]:
    """The counters in /proc/net/snmp or /proc/net/netstat, by protocol and name: each protocol has a
    line of names and a line of values.
    """
    lines = text.splitlines()
    counters: dict[str, Mapping[str, int]] = {}
    for names, values in zip(lines[::2], lines[1::2], strict=False):
        protocol, _, rest = names.partition(":")
        numbers = values.partition(":")[2].split()
        counters[protocol] = {
            name: int(number) for name, number in zip(rest.split(), numbers, strict=False)
        }
    return counters
