"""Messages of the kernel that explain hangs, in the format of /dev/kmsg."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hangwatch.agent.node.hardware import kernel_log
from hangwatch.agent.node.hardware.host import SourceUnavailableError
from hangwatch.model.hardware import Weight

from .trees import make_host


def write_log(root: Path, *messages: str, at_s: float = 990.0) -> None:
    lines = [f"6,{n},{int(at_s * 1e6)},-;{message}\n" for n, message in enumerate(messages)]
    (root / "kmsg").write_text("".join(lines))


@pytest.mark.parametrize(
    ("message", "what", "about", "now"),
    [
        (
            "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus.",
            "xid",
            "GPU 0000:3b:00",
            "79",
        ),
        (
            "NVRM: Xid (0000:5e:00): 119, Timeout after 6s of waiting",
            "xid",
            "GPU 0000:5e:00",
            "119",
        ),
        (
            "Memory cgroup out of memory: Killed process 4711 (python) total-vm:9kB",
            "oom_kill",
            "process 4711",
            "python",
        ),
        ("Out of memory: Killed process 12 (pt_data) total", "oom_kill", "process 12", "pt_data"),
        (
            "mlx5_core 0000:a1:00.0: poll_health:801: device's health compromised",
            "mlx5",
            "0000:a1:00.0",
            None,
        ),
        ("mlx5_core 0000:a1:00.0 ens1np0: Link down", "link_down", "ens1np0", None),
        ("e1000e: eth0 NIC Link is Down", "link_down", "eth0", None),
        (
            "nfs: server storage1 not responding, still trying",
            "nfs_not_responding",
            "storage1",
            None,
        ),
        (
            "INFO: task pt_main_thread:4711 blocked for more than 120 seconds.",
            "hung_task",
            "process 4711",
            "pt_main_thread, for more than 120 s",
        ),
        ("blk_update_request: I/O error, dev nvme0n1, sector 7", "io_error", "nvme0n1", None),
        (
            "pcieport 0000:00:01.0: AER: Uncorrectable (Fatal) error message received",
            "pcie_error",
            "0000:00:01.0",
            None,
        ),
    ],
)
def test_message(tmp_path: Path, message: str, what: str, about: str, now: str | None) -> None:
    write_log(tmp_path, "usb 1-1: new device", message, " SUBSYSTEM=pci")
    (found,) = kernel_log.probe(make_host(tmp_path))
    assert (found.what, found.about, found.age_s) == (what, about, 10.0)
    assert found.weight is Weight.FAULT and found.is_abnormal
    if now is not None:
        assert found.now == now


@pytest.mark.parametrize(
    "message",
    [
        "mlx5_core 0000:a1:00.0 ens1np0: Link up",
        "eth0: link is up",
        "nfs: server storage1 OK",
        "pcieport 0000:00:01.0: AER: Corrected error message received",
        "NVRM: loading NVIDIA UNIX Open Kernel Module",
    ],
)
def test_normal_message(tmp_path: Path, message: str) -> None:
    write_log(tmp_path, message)
    assert kernel_log.probe(make_host(tmp_path)) == ()


def test_old_messages_are_left_out_and_the_newest_kept(tmp_path: Path) -> None:
    message = "NVRM: Xid (PCI:0000:3b:00): {}, x"
    write_log(tmp_path, message.format(13), at_s=99.0)
    assert kernel_log.probe(make_host(tmp_path)) == ()
    write_log(tmp_path, *(message.format(n) for n in range(100)))
    found = kernel_log.probe(make_host(tmp_path))
    assert [o.now for o in found] == [str(n) for n in range(68, 100)]


def test_log_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError

    write_log(tmp_path, "x")
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(SourceUnavailableError) as refusal:
        kernel_log.probe(make_host(tmp_path))
    assert "CAP_SYSLOG" in refusal.value.remedy


def test_missing_log(tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailableError, match="No such file"):
        kernel_log.probe(make_host(tmp_path))


@pytest.mark.parametrize(
    ("namespace", "message", "expected"),
    [
        ("pid:[4026531836]", "31, pid=4711, name=python3, MMU Fault",
         ("program_xid", "process 4711", "31 on GPU 0000:3b:00", Weight.FAULT)),
        ("pid:[4026531836]", "31, pid='<unknown>', name=<unknown>, MMU Fault",
         ("xid", "GPU 0000:3b:00", "31", Weight.HINT)),
        ("pid:[4026532201]", "13, pid=4711, name=python3, Graphics SM Warp Exception",
         ("xid", "GPU 0000:3b:00", "13", Weight.HINT)),
        ("pid:[4026531836]", "45, pid=4711, name=python3, Ch 00000010",
         ("xid", "GPU 0000:3b:00", "45", Weight.HINT)),
        ("pid:[4026531836]", "79, pid=4711, name=python3, GPU has fallen off the bus.",
         ("xid", "GPU 0000:3b:00", "79", Weight.FAULT)),
        ("pid:[4026531836]", "999, pid=4711, a code of a later driver",
         ("xid", "GPU 0000:3b:00", "999", Weight.FAULT)),
    ],
)  # fmt: skip
def test_xid_of_a_program_belongs_to_its_process(
    namespace: str, message: str, expected: tuple[object, ...], tmp_path: Path
) -> None:
    """In a container, the kernel's process IDs mean other processes or none."""
    write_log(tmp_path, f"NVRM: Xid (PCI:0000:3b:00): {message}")
    host = make_host(tmp_path)
    (host.proc / "self/ns").mkdir(parents=True)
    (host.proc / "self/ns/pid").symlink_to(namespace)
    (found,) = kernel_log.probe(host)
    assert (found.what, found.about, found.now, found.weight) == expected
