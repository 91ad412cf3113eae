"""Memory, CPU and storage: cgroups, pressure, threads that wait in the kernel, and NFS."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hangwatch.agent.node.hardware import host_resources
from hangwatch.agent.node.hardware.host import SourceUnavailableError
from hangwatch.model.hardware import Weight

from .trees import make_host, write_files


def test_cgroup_version_2(tmp_path: Path) -> None:
    write_files(tmp_path / "proc/7", {"cgroup": "0::/kubepods/pod1"})
    write_files(tmp_path / "proc/8", {"cgroup": "0::/kubepods/pod1"})
    write_files(
        tmp_path / "sys/fs/cgroup/kubepods/pod1",
        {
            "memory.events": "low 0\nhigh 0\nmax 31\noom 1\noom_kill 1",
            "cpu.stat": "usage_usec 9\nnr_periods 5\nnr_throttled 2\nthrottled_usec 17",
        },
    )
    found = host_resources.probe_cgroups(make_host(tmp_path, pids=(7, 8)))
    assert [(o.about, o.what, o.now, o.weight) for o in found] == [
        ("/kubepods/pod1", "memory_at_limit", 31, Weight.HINT),
        ("/kubepods/pod1", "oom_kill", 1, Weight.FAULT),
        ("/kubepods/pod1", "nr_throttled", 2, Weight.HINT),
    ]


def test_cgroup_of_a_container_whose_files_are_at_the_root(tmp_path: Path) -> None:
    write_files(tmp_path / "proc/7", {"cgroup": "0::/kubepods/pod1"})
    write_files(tmp_path / "sys/fs/cgroup", {"memory.events": "oom_kill 3"})
    (found,) = host_resources.probe_cgroups(make_host(tmp_path, pids=(7,)))
    assert (found.about, found.what, found.now) == ("/", "oom_kill", 3)


def test_cgroup_version_1(tmp_path: Path) -> None:
    write_files(tmp_path / "proc/7", {"cgroup": "9:memory:/job\n4:cpu,cpuacct:/job\n2:pids:/job"})
    write_files(
        tmp_path / "sys/fs/cgroup",
        {
            "memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2",
            "cpu,cpuacct/job/cpu.stat": "nr_periods 0\nnr_throttled 4\nthrottled_time 1",
        },
    )
    found = host_resources.probe_cgroups(make_host(tmp_path, pids=(7,)))
    assert [(o.about, o.what, o.now) for o in found] == [
        ("/memory/job", "oom_kill", 2),
        ("/cpu,cpuacct/job", "nr_throttled", 4),
    ]


def test_unreadable_cgroup(tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailableError, match="cannot be read"):
        list(host_resources.probe_cgroups(make_host(tmp_path, pids=(7,))))
    assert not list(host_resources.probe_cgroups(make_host(tmp_path)))


def test_pressure(tmp_path: Path) -> None:
    line = "avg10={} avg60=0.00 avg300=0.00 total=1"
    write_files(
        tmp_path / "proc/pressure",
        {
            "cpu": "some " + line.format("12.00"),
            "memory": f"some {line.format('50.00')}\nfull {line.format('0.50')}",
            "io": f"some {line.format('90.00')}\nfull {line.format('61.20')}",
        },
    )
    found = host_resources.probe_pressure(make_host(tmp_path))
    assert [(o.about, o.now, o.is_abnormal) for o in found] == [
        ("cpu", 12.0, False),
        ("memory", 0.5, False),
        ("io", 61.2, True),
    ]


def test_kernel_without_pressure(tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailableError) as refusal:
        list(host_resources.probe_pressure(make_host(tmp_path)))
    assert "psi=1" in refusal.value.remedy


def test_threads_that_wait_in_the_kernel(tmp_path: Path) -> None:
    for tid, state, channel in ((7, "S", "futex"), (8, "D", "nfs_wait"), (9, "D", "nfs_wait")):
        write_files(
            tmp_path / f"proc/7/task/{tid}",
            {"stat": f"{tid} (a ) b) {state} 1 1", "wchan": channel},
        )
    (found,) = host_resources.probe_storage(make_host(tmp_path, pids=(7,)))
    assert (found.about, found.what, found.now) == ("process 7", "uninterruptible in nfs_wait", 2)
    assert found.weight is Weight.FAULT


def test_nfs_requests_without_reply(tmp_path: Path) -> None:
    stats = """device /dev/vda mounted on / with fstype ext4
device storage1:/data mounted on /mnt/data with fstype nfs4 statvers=1.1
\tage: 1000
\txprt: tcp 700 1 1 0 12 3 5000 4988 0 5000 0 2 7 9
device storage2:/home mounted on /home with fstype nfs statvers=1.1
\txprt: tcp 700 1 1 0 12 3 44 44 0 5000 0 2 7 9"""
    write_files(tmp_path / "proc/self", {"mountstats": stats})
    found = host_resources.probe_storage(make_host(tmp_path))
    assert [(o.about, o.now, o.is_abnormal) for o in found] == [
        ("/mnt/data", 12, True),
        ("/home", 0, False),
    ]


def test_versions(tmp_path: Path) -> None:
    write_files(tmp_path / "proc/sys/kernel", {"osrelease": "6.8.0-45-generic"})
    write_files(tmp_path / "sys/module/nvidia", {"version": "570.86.15"})
    packages = "/opt/venv/lib/python3.11/site-packages"
    library = f"{packages}/nvidia/nccl/lib/libnccl.so.2"
    write_files(tmp_path / "proc/7", {"maps": f"7f00-7f01 r-xp 0 fd:0 9      {library}"})
    root = tmp_path / "proc/7/root" / packages.lstrip("/")
    (root / "nvidia_nccl_cu12-2.27.3.dist-info").mkdir(parents=True)
    groups = {"0/type": "identity", "1/type": "DMA", "2/type": "DMA"}
    write_files(tmp_path / "sys/kernel/iommu_groups", groups)
    found = list(host_resources.probe_versions(make_host(tmp_path, pids=(7,))))
    assert {o.about: o.now for o in found} == {
        "kernel": "6.8.0-45-generic",
        "machine": os.uname().machine,
        "iommu": "DMA and identity",
        "driver": "570.86.15",
        "nccl": "2.27.3",
    }
    assert all(o.weight is Weight.FACT for o in found)
