"""What NCCL's diagnostics find in a job, over a socket."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from hangwatch.agent.node.hardware import nccl_diagnostics
from hangwatch.agent.node.hardware.host import SourceUnavailableError
from hangwatch.model.hardware import Observation, Weight
from hangwatch.report.terminal import describe_observation

from .ras_server import DIAGNOSTICS, JSON_REPORT, serve_report
from .trees import make_host


def probe_address(root: Path, address: str) -> tuple[Observation, ...]:
    environ = {"NCCL_RAS_ADDR": address, nccl_diagnostics.VARIABLE: "1"}
    return nccl_diagnostics.probe(make_host(root, environ=environ))


def probe_report(root: Path, report: str | None) -> tuple[Observation, ...]:
    with serve_report(JSON_REPORT, diagnostics=report) as address:
        return probe_address(root, address)


def test_findings(tmp_path: Path) -> None:
    found = probe_report(tmp_path, DIAGNOSTICS)
    assert all(o.concerns_job and o.is_abnormal for o in found)
    by_weight = {
        weight: [describe_observation(o) for o in found if o.weight is weight] for weight in Weight
    }
    assert by_weight[Weight.FAULT] == [
        "the GPUs of ranks {3} of communicator 0x1234 have up to 2 uncorrected memory errors since they"
        " were started",
        "the GPUs of ranks {0,1,2,3,4,5,6,7,...} (N=9) of communicator 0x1234 have inactive NVLinks (9 of"
        " 16 ranks)",
        "host node1.example.org has reported Xid 79 (the GPU has fallen off the bus) since NCCL started or"
        " was last asked",
        "the NVSwitches of host node2 have reported SXid 12028 (fatal) since NCCL started or was last asked",
    ]
    assert by_weight[Weight.HINT] == [
        "NCCL_ALGO is not the same on all ranks: Ring on ranks {0,1,2,3,4,5,6,7,...} (N=15); (unset) on"
        " ranks {15}",
        "CUDA driver version: mismatch across 16 ranks in comm 0x1234, rank(s) {8,9} differ from rank 0"
        " (13000)",
        "the GPUs of ranks {0,1} of communicator 0x77 have inactive NVLinks (2 of 2 ranks)",
        "IOMMU mode: enabled (DMA remapping) for 2 relevant device(s) across 16/16 ranks in comm 0x1234",
        "host node1 has reported Xid 31 (memory page fault, often the program's) since NCCL started or was"
        " last asked",
    ]
    assert by_weight[Weight.FACT] == []


def test_job_must_allow_it(tmp_path: Path) -> None:
    with serve_report(JSON_REPORT, diagnostics=DIAGNOSTICS) as address:
        host = make_host(tmp_path, environ={"NCCL_RAS_ADDR": address})
        for read in (nccl_diagnostics.check, nccl_diagnostics.probe):
            with pytest.raises(SourceUnavailableError) as refusal:
                read(host)
            assert not refusal.value.remedy, "incidents do not show that it is off"


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        (None, "is older than 2.31"),
        ("BUSY: diagnostics already in progress\n", "BUSY: diagnostics already in progress"),
        ("ERROR: diagnostics failed to start (3)\n", r"failed to start \(3\)"),
        (DIAGNOSTICS[:500], "its report has no end"),
        ("", "its report has no end"),
    ],
)
def test_refusals(tmp_path: Path, report: str | None, reason: str) -> None:
    began = time.monotonic()
    with pytest.raises(SourceUnavailableError, match=reason):
        probe_report(tmp_path, report)
    assert time.monotonic() - began < nccl_diagnostics.ANSWER_TIMEOUT_S


@contextmanager
def serve_bytes(*parts: bytes, pause_s: float = 0.0) -> Iterator[str]:
    """The address of a server that sends the parts, with pauses, and the last one until it may not."""
    stop = threading.Event()

    def answer() -> None:
        connection, _ = server.accept()
        with connection, suppress(OSError):  # the client has given up
            for part in parts:
                connection.sendall(part)
            while not stop.wait(pause_s):
                connection.sendall(parts[-1])

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        stop.set()
        thread.join()


GREETING = b"SERVER PROTOCOL 2\nOK\n"


def test_server_that_sends_a_little_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_diagnostics, "ANSWER_TIMEOUT_S", 0.5)
    with (
        serve_bytes(GREETING, b"x", pause_s=0.05) as address,
        pytest.raises(SourceUnavailableError, match="did not answer in time"),
    ):
        probe_address(tmp_path, address)


@pytest.mark.parametrize(
    "filler", [b"x" * 65536, b"a:1 NCCL DIAG [INFO] Xid 79 detected \n" * 1000]
)
def test_server_that_sends_without_end(tmp_path: Path, filler: bytes) -> None:
    with (
        serve_bytes(GREETING, filler) as address,
        pytest.raises(SourceUnavailableError, match="its report has no end"),
    ):
        probe_address(tmp_path, address)


def test_many_findings_and_long_lines_are_limited(tmp_path: Path) -> None:
    start, end = (
        "a:1 NCCL DIAG ",
        "a:1 NCCL DIAG RAS diagnostics completed in 1.0 ms across 1 RAS peers\n",
    )
    lines = [f"{start}[INFO] check {number}: {'x' * 5000}\n" for number in range(50)]
    lines += [
        f"{start}[INFO] NCCL environment: NCCL_{number}={'y' * 900} on rank(s) {{0}}\n"
        for number in range(50)
    ]
    lines.append(f"{start}[INFO] Xid 79 detected 1 time on host late. See\n")
    found = probe_report(tmp_path, "".join((*lines, end)))
    assert len(found) == 2 * nccl_diagnostics._MAX_FINDINGS
    assert any(o.about == "host late" for o in found), "faults come first"
    assert all(len(str(o.now)) <= 200 and len(o.about) <= 200 for o in found)


def test_another_service(tmp_path: Path) -> None:
    with (
        serve_bytes(b"HTTP/1.1 400 Bad Request\r\n", pause_s=10) as address,
        pytest.raises(SourceUnavailableError, match="is not NCCL"),
    ):
        probe_address(tmp_path, address)
