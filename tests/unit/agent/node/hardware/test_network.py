"""The interface that a job uses, and TCP's counters."""

from __future__ import annotations

from pathlib import Path

import pytest

from hangwatch.agent.node.hardware import network
from hangwatch.agent.node.hardware.host import SourceUnavailableError
from hangwatch.model.hardware import Weight

from .trees import make_host, write_files

NAMES = ["docker0", "eth0", "eth1", "ib0", "lo"]
# Destination, gateway and mask are hexadecimal, in the byte order of the machine.
ROUTES = """Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT
eth0 00000000 0101A8C0 0003 0 0 100 00000000 0 0 0
eth1 0000000A 00000000 0001 0 0 0 000000FF 0 0 0
ib0 0001000A 00000000 0001 0 0 0 00FFFFFF 0 0 0
"""


def make_network(root: Path) -> None:
    for name in NAMES:
        state = "unknown" if name == "lo" else "down" if name == "docker0" else "up"
        files = {
            "operstate": state,
            "carrier_down_count": 1,
            "statistics/rx_errors": 0,
            "statistics/rx_crc_errors": 4,
        }
        write_files(root / "sys/class/net" / name, files)
    write_files(root / "proc/net", {"route": ROUTES})


@pytest.mark.parametrize(
    ("environ", "chosen"),
    [
        ({"NCCL_SOCKET_IFNAME": "eth"}, ["eth0", "eth1"]),
        ({"NCCL_SOCKET_IFNAME": "=eth1"}, ["eth1"]),
        ({"NCCL_SOCKET_IFNAME": "^eth,docker"}, ["ib0"]),
        ({"NCCL_SOCKET_IFNAME": "^=eth0"}, ["docker0", "eth1", "ib0"]),
        ({"NCCL_SOCKET_IFNAME": "ib0:1,lo"}, ["ib0", "lo"]),
        ({"GLOO_SOCKET_IFNAME": "ib0"}, ["ib0"]),
        ({"NCCL_SOCKET_IFNAME": "wlan"}, ["eth0", "eth1", "ib0"]),
        ({"MASTER_ADDR": "10.0.1.7"}, ["ib0"]),
        ({"MASTER_ADDR": "10.2.0.1"}, ["eth1"]),
        ({"MASTER_ADDR": "192.168.3.4"}, ["eth0"]),
        ({"MASTER_ADDR": "node1"}, ["eth0", "eth1", "ib0"]),
        ({}, ["eth0", "eth1", "ib0"]),
    ],
)
def test_interfaces_of_the_job(tmp_path: Path, environ: dict[str, str], chosen: list[str]) -> None:
    make_network(tmp_path)
    host = make_host(tmp_path, environ=environ)
    assert network.choose_interfaces(host, NAMES) == chosen


def test_counters_of_an_interface_and_of_tcp(tmp_path: Path) -> None:
    make_network(tmp_path)
    write_files(
        tmp_path / "proc/net",
        {
            "snmp": "Ip: Forwarding\nIp: 1\nTcp: ActiveOpens RetransSegs\nTcp: 12 345",
            "netstat": "TcpExt: SyncookiesSent TCPTimeouts\nTcpExt: 0 6",
        },
    )
    found = network.probe_interfaces(make_host(tmp_path, environ={"NCCL_SOCKET_IFNAME": "=eth0"}))
    values = {(o.about, o.what): (o.now, o.weight) for o in found}
    assert values == {
        ("TCP", "RetransSegs"): (345, Weight.HINT),
        ("TCP", "TCPTimeouts"): (6, Weight.HINT),
        ("eth0", "state"): ("up", Weight.FAULT),
        ("eth0", "carrier_down_count"): (1, Weight.FAULT),
        ("eth0", "rx_errors"): (0, Weight.HINT),
        ("eth0", "rx_crc_errors"): (4, Weight.HINT),
    }


def test_host_without_sysfs(tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailableError) as refusal:
        list(network.probe_interfaces(make_host(tmp_path)))
    assert refusal.value.remedy == "mount /sys into the container"
