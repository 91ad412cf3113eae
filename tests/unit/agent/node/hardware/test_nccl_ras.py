"""NCCL's report on its communicators, over a socket."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from hangwatch.agent.node.hardware import nccl_ras
from hangwatch.agent.node.hardware.host import Host, SourceUnavailableError
from hangwatch.model.hardware import Observation, Weight

from .ras_server import JSON_REPORT, TEXT_REPORT, serve_report
from .trees import make_host


def probe_address(root: Path, address: str) -> tuple[Observation, ...]:
    return nccl_ras.probe(make_host(root, environ={"NCCL_RAS_ADDR": address}))


def test_json_report(tmp_path: Path) -> None:
    """The list of missing ranks lacks a comma, as that of NCCL 2.28.9 does."""
    with serve_report(JSON_REPORT) as address:
        found = probe_address(tmp_path, address)
    about = "communicator 0xae94423cfbb2ef4a"
    assert [(o.about, o.what, o.now, o.weight) for o in found] == [
        ("nccl", "version", "2.28.9", Weight.FACT),
        (about, "does_not_answer", "rank 3, process 101 on 10.0.0.2, GPU 1", Weight.FAULT),
        (about, "async_error", "rank 1, process 101 on 10.0.0.1, GPU 1: 6", Weight.FAULT),
        (about, "lags", "rank 2, process 100 on 10.0.0.2, GPU 0: 11 of 12 AllReduce", Weight.HINT),
    ]


def test_report_of_another_job_is_not_read() -> None:
    with serve_report(JSON_REPORT) as address:
        environ = {"NCCL_RAS_ADDR": address}
        assert nccl_ras.probe(Host(environ=environ, pids=(os.getpid(),)))
        with subprocess.Popen(["sleep", "60"]) as rank:
            host = Host(environ=environ, pids=(rank.pid,))
            for read in (nccl_ras.check, nccl_ras.probe):
                with pytest.raises(SourceUnavailableError, match="another job's process listens"):
                    read(host)
            rank.kill()


def test_text_report(tmp_path: Path) -> None:
    with serve_report(TEXT_REPORT, has_json=False) as address:
        found = probe_address(tmp_path, address)
    communicator = "communicator cf264af53edbe986"
    assert [(o.about, o.what, o.now, o.weight) for o in found] == [
        ("nccl", "version", "2.26.2", Weight.FACT),
        (
            "job",
            "dead",
            "1 job process is considered dead (unreachable via the RAS network); Process 3487984 on"
            " node 172.16.64.213 managing GPU 5",
            Weight.FAULT,
        ),
        (
            communicator,
            "incomplete",
            "Missing communicator data from 1 rank; The missing rank: 21",
            Weight.FAULT,
        ),
        (
            "job",
            "timeout",
            "Encountered 2 communication timeouts while gathering communicator data",
            Weight.HINT,
        ),
    ]


def test_server_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ras, "QUERY_TIMEOUT_S", 0.2)
    with (
        serve_report(JSON_REPORT, hangs=True) as address,
        pytest.raises(SourceUnavailableError, match="did not answer in time"),
    ):
        probe_address(tmp_path, address)


def test_nobody_listens(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(SourceUnavailableError, match="no process of the job listens"):
        probe_address(tmp_path, address)


@pytest.mark.parametrize("address", ["localhost", "localhost:x"])
def test_invalid_address(tmp_path: Path, address: str) -> None:
    with pytest.raises(SourceUnavailableError) as refusal:
        probe_address(tmp_path, address)
    assert refusal.value.remedy == "set it to HOST:PORT"


def test_another_service(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.recv(1000)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(SourceUnavailableError, match="is not NCCL"):
            probe_address(tmp_path, f"127.0.0.1:{server.getsockname()[1]}")
        thread.join()
