"""Ports of InfiniBand and RoCE adapters, by constructed trees of /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from hangwatch.agent.node.hardware import network
from hangwatch.agent.node.hardware.host import SourceUnavailableError
from hangwatch.model.hardware import Observation, Weight

from .trees import make_host, write_files


def write_port(root: Path, port: str = "mlx5_0/ports/1", **changed: object) -> None:
    files = {
        "state": "4: ACTIVE",
        "phys_state": "5: LinkUp",
        "rate": "400 Gb/sec (4X NDR)",
        "counters/link_downed": 2,
        "counters/symbol_error": 0,
        "counters/port_xmit_wait": 812345,
        "hw_counters/local_ack_timeout_err": 7,
    } | {name.replace("__", "/"): value for name, value in changed.items()}
    write_files(root / "sys/class/infiniband" / port, files)


def read_ports(root: Path) -> dict[tuple[str, str], Observation]:
    found = network.probe_infiniband(make_host(root))
    return {(observation.about, observation.what): observation for observation in found}


def test_port(tmp_path: Path) -> None:
    write_port(tmp_path)
    ports = read_ports(tmp_path)
    assert ports["mlx5_0/1", "state"].now == "ACTIVE"
    assert ports["mlx5_0/1", "phys_state"].now == "LinkUp"
    link_downed = ports["mlx5_0/1", "link_downed"]
    assert (link_downed.now, link_downed.weight, link_downed.is_counter) == (2, Weight.FAULT, True)
    assert ports["mlx5_0/1", "local_ack_timeout_err"].weight is Weight.HINT
    assert ("mlx5_0/1", "port_xmit_wait") not in ports, "it grows on a healthy network, too"
    assert not any(observation.is_abnormal for observation in ports.values())


def test_several_adapters_and_ports(tmp_path: Path) -> None:
    for port in ("mlx5_0/ports/1", "mlx5_1/ports/1", "mlx5_1/ports/2"):
        write_port(tmp_path, port)
    abouts = {about for about, _ in read_ports(tmp_path)}
    assert abouts == {"mlx5_0/1", "mlx5_1/1", "mlx5_1/2"}


def test_unreadable_counters_are_left_out(tmp_path: Path) -> None:
    write_port(tmp_path, counters__link_downed="N/A (no PMA)")
    assert ("mlx5_0/1", "link_downed") not in read_ports(tmp_path)


def test_host_without_adapter(tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailableError, match="no InfiniBand or RoCE adapter"):
        list(network.probe_infiniband(make_host(tmp_path)))
