"""The diagnosis of hangs whose causes were found in public reports, from the files and replies
that a host has in each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from hangwatch.agent.node.hardware import host_resources, kernel_log, nccl_ras, network
from hangwatch.agent.node.hardware.host import Host
from hangwatch.agent.node.hardware.monitor import find_changes
from hangwatch.agent.node.hardware.reader import Probe, Reading
from hangwatch.model.hardware import Observation, Weight
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.limits import Limits
from hangwatch.model.verdicts import Verdict
from hangwatch.protocol.heartbeat import HardwareReply
from tests.simulation.scripted_job import ScriptedJob
from tests.unit.agent.node.hardware.ras_server import serve_report
from tests.unit.agent.node.hardware.trees import make_host, write_files

STALL_AFTER_S = 10.0
HOSTS = 4
_PORT = "sys/class/infiniband/mlx5_0/ports/1"


class Cluster:
    """A job with a rank on each of four hosts, whose files are in folders of their own."""

    def __init__(self, folder: Path) -> None:
        self.job = ScriptedJob(HOSTS, limits=Limits(stall_after_s=STALL_AFTER_S, slow_limit_s=60))
        for number, rank in self.job.ranks.items():
            rank.host = f"node{number}"
        self.roots = [folder / f"node{number}" for number in range(HOSTS)]
        self._baselines: list[list[Reading]] = [[] for _ in self.roots]
        for _ in range(3):
            self.job.make_calls()
        self.job.send_heartbeats()

    def write_files(self, files: Mapping[str, object], *hosts: int) -> None:
        """Writes the files on these hosts, or on all if none is given."""
        for number in hosts or range(HOSTS):
            write_files(self.roots[number], files)

    def take_baselines(self, *probes: Probe) -> None:
        for number, baselines in enumerate(self._baselines):
            baselines.append(self._read(number, probes, taken_ns=1))

    def stall(self) -> None:
        """All ranks enter a call that does not complete."""
        self.job.make_calls(done=False)

    def diagnose(self, *probes: Probe, environ: Mapping[str, str] | None = None) -> Verdict:
        """The verdict once it is due, with the evidence of all hosts."""
        for _ in range(int(STALL_AFTER_S) + 2):
            self.job.advance_time(1.0)
            self.job.send_heartbeats()
        for number, baselines in enumerate(self._baselines):
            reading = self._read(number, probes, taken_ns=60_000_000_000, environ=environ)
            self._report(number, find_changes(reading, baselines, onset_ns=2))
        (verdict,) = self.job.list_due_verdicts()
        return verdict

    def get_pid(self, rank: int) -> int:
        return self.job.latest_attempt.processes[rank].identity.pid

    def _read(
        self,
        number: int,
        probes: Iterable[Probe],
        taken_ns: int,
        environ: Mapping[str, str] | None = None,
    ) -> Reading:
        host = make_host(self.roots[number], pids=(self.get_pid(number),), environ=environ)
        observations = tuple(o for probe in probes for o in probe(host))
        return Reading(taken_ns=taken_ns, observations=observations)

    def _report(self, number: int, observations: tuple[Observation, ...]) -> None:
        key = self.job.latest_attempt.processes[number].key
        reply = HardwareReply(key=key, request="r", observations=observations)
        host = f"node{number}"
        self.job.apply_heartbeat(host=host, agent=f"agent-{host}", hardware=(reply,))


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    made = Cluster(tmp_path)
    made.write_files({"kmsg": "6,0,1000000,-;Linux version 6.8.0"})
    made.write_files(
        {
            f"{_PORT}/state": "4: ACTIVE",
            f"{_PORT}/rate": "400 Gb/sec (4X NDR)",
            f"{_PORT}/counters/link_downed": 0,
            f"{_PORT}/hw_counters/roce_adp_retrans": 3,
            "proc/sys/kernel/osrelease": "6.8.0",
        }
    )
    return made


def log(message: str) -> dict[str, object]:
    return {"kmsg": f"3,7,990000000,-;{message}"}


def test_out_of_memory_on_one_stage(cluster: Cluster) -> None:
    """The others fail later, in their cleanup, and hide it."""
    cluster.stall()
    cluster.job.end_process(2, signal=9)
    pid = cluster.get_pid(2)
    cluster.write_files(log(f"Out of memory: Killed process {pid} (python) total-vm:9kB"), 2)
    verdict = cluster.diagnose(kernel_log.probe)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEAD_RANK, (2,))
    assert f"the kernel killed process {pid} (python) for lack of memory" in verdict.advice


def test_port_that_flaps(cluster: Cluster) -> None:
    cluster.take_baselines(network.probe_infiniband)
    cluster.write_files({f"{_PORT}/counters/link_downed": 1}, 3)
    cluster.stall()
    verdict = cluster.diagnose(network.probe_infiniband)
    assert verdict.kind is VerdictKind.NO_PROGRESS
    assert "Of 4 hosts, node3 alone" in verdict.advice
    assert "the link of mlx5_0/1 went down (0 to 1 times)" in verdict.advice


def test_retransmissions_on_one_host(cluster: Cluster) -> None:
    cluster.take_baselines(network.probe_infiniband)
    cluster.write_files({f"{_PORT}/hw_counters/roce_adp_retrans": 812}, 1)
    cluster.stall()
    advice = cluster.diagnose(network.probe_infiniband).advice
    assert "node1 alone reports this, which may contribute: roce adp retrans of mlx5_0/1" in advice


def test_adapters_of_different_speed(cluster: Cluster) -> None:
    cluster.write_files({f"{_PORT}/rate": "200 Gb/sec (4X HDR)"}, 2)
    cluster.stall()
    assert cluster.diagnose(network.probe_infiniband).advice.endswith(
        "node2 alone has mlx5_0/1 rate 200 Gb/sec (4X HDR), where the other hosts have 400 Gb/sec (4X"
        " NDR)."
    )


def test_iommu_that_translates_on_one_host(cluster: Cluster) -> None:
    cluster.write_files({"sys/kernel/iommu_groups/0/type": "identity"})
    cluster.write_files({"sys/kernel/iommu_groups/0/type": "DMA"}, 1)
    cluster.stall()
    assert (
        "node1 alone has iommu version DMA"
        in cluster.diagnose(host_resources.probe_versions).advice
    )


def test_xid_during_a_collective(cluster: Cluster) -> None:
    cluster.write_files(
        log("NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."), 0
    )
    cluster.stall()
    advice = cluster.diagnose(kernel_log.probe).advice
    assert "node0 alone reports a fault" in advice
    assert "GPU 0000:3b:00 reported Xid 79 (the GPU has fallen off the bus)" in advice


def test_gpu_that_stops_silently(cluster: Cluster) -> None:
    """The GPU is idle, and all others spin in NCCL's kernel."""

    def probe_gpu(host: Host) -> tuple[Observation, ...]:
        is_idle = host.sys.parent.name == "node2"
        what, now = ("idle", "95 W") if is_idle else ("spins", "100 % busy at 160 of 700 W")
        return (Observation(source="nvml", about="GPU 0", what=what, now=now, is_abnormal=True),)

    cluster.stall()
    advice = cluster.diagnose(probe_gpu).advice
    assert "GPU 0 of node2 is idle while 3 GPUs spin" in advice


def test_nccl_that_leaks_proxy_slots(cluster: Cluster) -> None:
    """NCCL 2.28.9 on Arm."""

    def probe_versions(host: Host) -> tuple[Observation, ...]:
        facts = {"nccl": "2.28.9", "machine": "aarch64"}
        return tuple(
            Observation(source="versions", about=about, what="version", now=now, weight=Weight.FACT)
            for about, now in facts.items()
        )

    cluster.stall()
    advice = cluster.diagnose(probe_versions).advice
    assert "NCCL 2.28.9 is known to lose slots of its proxy's queue" in advice
    assert "2.29.3 has the fix" in advice


def test_storage_that_stalls_in_a_checkpoint(cluster: Cluster) -> None:
    """Rank 0 writes it, and the others wait."""
    cluster.job.make_calls(done=False, except_ranks=(0,))
    pid = cluster.get_pid(0)
    cluster.write_files(
        {
            **log("nfs: server storage1 not responding, still trying"),
            f"proc/{pid}/task/{pid}/stat": f"{pid} (python) D 1",
            f"proc/{pid}/task/{pid}/wchan": "nfs_wait_on_request",
        },
        0,
    )
    verdict = cluster.diagnose(kernel_log.probe, host_resources.probe_storage)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.MISSING_RANK, (0,))
    assert "the NFS server storage1 does not respond" in verdict.advice
    assert "Check the storage server" in verdict.advice


def test_process_that_nccl_considers_dead(cluster: Cluster) -> None:
    report = """NCCL version 2.26.2 compiled with CUDA 12.8

Errors
======

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 3487984 on node 172.16.64.213 managing GPU 5

"""
    cluster.stall()
    with serve_report(report, has_json=False) as address:
        verdict = cluster.diagnose(nccl_ras.probe, environ={"NCCL_RAS_ADDR": address})
    assert verdict.advice.endswith(
        "NCCL itself reports: 1 job process is considered dead (unreachable via the RAS network);"
        " Process 3487984 on node 172.16.64.213 managing GPU 5."
    )
