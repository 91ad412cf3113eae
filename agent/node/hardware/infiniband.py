"""InfiniBand and RoCE ports: their state and their error counters.

Counters of congestion control, which grow on healthy networks as well, are left out. The names are
those of Documentation/ABI/stable/sysfs-class-infiniband and of NVIDIA's counters of mlx5.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hangwatch.model.hardware import Observation, Weight

from .host import Host, SourceUnavailableError, list_names, observe, read_counters, read_text

SOURCE = "infiniband"

_FAULT_COUNTERS = ("link_downed",)
_HINT_COUNTERS = (
    "symbol_error",
    "link_error_recovery",
    "port_rcv_errors",
    "port_rcv_remote_physical_errors",
    "port_xmit_discards",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)
_HINT_HW_COUNTERS = (
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


def check(host: Host) -> None:
    """Raises SourceUnavailableError if there is no adapter."""
    if not list_names(host.sys / "class" / "infiniband"):
        raise SourceUnavailableError("this host has no InfiniBand or RoCE adapter")


def probe(host: Host) -> tuple[Observation, ...]:
    """The ports of all adapters. Raises SourceUnavailableError if there are none."""
    check(host)
    folder = host.sys / "class" / "infiniband"
    return tuple(
        observation
        for adapter in list_names(folder)
        for port in list_names(folder / adapter / "ports")
        for observation in _read_port(f"{adapter}/{port}", folder / adapter / "ports" / port)
    )


def _read_port(about: str, port: Path) -> Iterator[Observation]:
    # Only a change means something, since the job uses no port that was down before it.
    for what in ("state", "phys_state"):
        state = read_text(port / what)
        if state:
            name = state.partition(":")[2].strip() or state  # "4: ACTIVE"
            yield observe(SOURCE, about, what, name, Weight.FAULT)
    rate = read_text(port / "rate")
    if rate:
        yield observe(SOURCE, about, "rate", rate, Weight.FACT)
    yield from read_counters(SOURCE, about, port / "counters", _FAULT_COUNTERS, Weight.FAULT)
    yield from read_counters(SOURCE, about, port / "counters", _HINT_COUNTERS)
    yield from read_counters(SOURCE, about, port / "hw_counters", _HINT_HW_COUNTERS)
