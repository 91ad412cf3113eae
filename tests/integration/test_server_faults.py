"""What goes wrong around a real server: kills, full disks, heartbeats that come twice, late or in
pieces, and crowds.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hangwatch.protocol import codec, heartbeat
from tests.harness.problems import check_problem
from tests.harness.server import Server, run_server
from tests.simulation.http_receiver import WebhookReceiver
from tests.simulation.job_reporter import JobReporter
from tests.simulation.simulated_job import SimulatedJob, make_hung_job
from tests.simulation.waiting import wait_for_value, wait_until

STALL_AFTER_S = "2"  # --stall-after


@contextlib.contextmanager
def open_client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, trust_env=False, timeout=20) as client:
        yield client


def test_killed_server_resumes_incident_without_second_alert(
    tmp_path: Path,
) -> None:
    with WebhookReceiver() as hook:
        flags = ["--stall-after", STALL_AFTER_S, "--alert", hook.url]
        with run_server(tmp_path, *flags) as first, open_client(first) as client:
            reporter = JobReporter(client, make_hung_job())
            rerun = SimulatedJob(ranks=4, name="rerun", host="node1", restart=1)
            rerun_reporter = JobReporter(client, rerun)
            rerun_reporter.send_heartbeat()
            rerun.restart = 3
            rerun_reporter.send_heartbeat()
            reporter.send_until(lambda: hook.requests, "the alert")
            [opened] = reporter.list_incidents()
            time.sleep(0.3)  # within a second of the alert
            first.stop(signal.SIGKILL)
        with run_server(tmp_path, *flags) as second, open_client(second) as client:
            [kept] = client.get("/api/v1/incidents").json()["items"]
            assert (kept["id"], kept["status"], kept["culprits"]) == (opened["id"], "open", [2])
            past = client.get("/api/v1/attempts", params={"job": "run7"}).json()["items"]
            assert [(a["attempt"], a["world_size"], a["hosts"]) for a in past] == [
                (0, 4, ["node1"])
            ]
            reporter.client = client
            rerun.started_at = time.monotonic() - 60
            JobReporter(client, rerun, agent="r2").send_heartbeat()
            assert (
                client.get("/api/v1/jobs", params={"job": "rerun"}).json()["items"][0]["attempt"]
                == 3
            )
            reporter.send_until(
                lambda: [
                    i
                    for i in reporter.list_incidents()
                    if i["stacks"] and i["waiting"] == [0, 1, 3]
                ],
                "new evidence",
            )
            second.stop(signal.SIGKILL)
        with run_server(tmp_path, *flags) as third, open_client(third) as client:
            reporter.client = client
            reporter.job.resume_training()
            reporter.send_until(
                lambda: [i for i in reporter.list_incidents() if i["status"] == "resolved"],
                "its resolution",
            )
            wait_for_value(lambda: len(hook.requests) > 1, "the message that it is resolved")
            assert [i["id"] for i in reporter.list_incidents()] == [opened["id"]]
        assert hook.events == ["opened", "resolved"]
        log = third.read_log()
        assert (log.count("ALERT job"), log.count("RESOLVED after")) == (1, 1)


def test_unsent_alert_is_sent_by_restarted_server(tmp_path: Path) -> None:
    with WebhookReceiver(503) as hook:
        flags = ["--stall-after", STALL_AFTER_S, "--alert", hook.url]
        with run_server(tmp_path, *flags) as first, open_client(first) as client:
            JobReporter(client, make_hung_job()).send_until(
                lambda: hook.requests, "the first attempt"
            )
            first.stop(signal.SIGKILL)
        hook.statuses, before = [204], len(hook.requests)
        with run_server(tmp_path, *flags):
            wait_for_value(lambda: len(hook.requests) > before, "the next attempt")
        assert {request.headers["webhook-id"] for request in hook.requests} == {
            hook.requests[0].headers["webhook-id"]
        }


def test_full_disk_delays_no_alert_and_loses_nothing(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "hangwatch-test", str(data)]
    if (mounted := subprocess.run(command, capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"needs to mount a tmpfs, as root: {mounted.stderr.strip()}")
    try:
        with (
            WebhookReceiver() as hook,
            run_server(tmp_path, "--stall-after", STALL_AFTER_S, "--alert", hook.url) as server,
            open_client(server) as client,
        ):
            filler = data / "filler"
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(b"\0" * 4096)
            reporter = JobReporter(client, make_hung_job())
            reporter.send_until(lambda: hook.requests, "the alert despite the full disk")
            reporter.send_until(
                lambda: client.get("/readyz").status_code == 503, "that it is not ready"
            )
            assert "disk" in check_problem(client.get("/readyz"), 503)
            assert len(reporter.list_incidents()) == 1
            filler.unlink()
            reporter.send_until(
                lambda: client.get("/readyz").status_code == 200, "that it is ready again"
            )
            server.stop(signal.SIGKILL)
        with (
            run_server(tmp_path, "--stall-after", STALL_AFTER_S) as again,
            open_client(again) as client,
        ):
            [kept] = client.get("/api/v1/incidents").json()["items"]
            assert kept["culprits"] == [2]
        assert hook.events == ["opened"]
    finally:
        subprocess.run(["umount", "--lazy", str(data)], check=True)


def test_repeated_late_or_split_heartbeats_change_nothing(tmp_path: Path) -> None:
    with run_server(tmp_path, "--stall-after", "60") as server, open_client(server) as client:
        job = SimulatedJob(ranks=4, host="node1")
        reporter = JobReporter(client, job)

        def send_heartbeat(number: int, entered: int) -> httpx.Response:
            process = job.make_process_update(0, full=True)
            stream = heartbeat.StreamUpdate(
                uid=1, entered=entered, completed=entered, op="all_reduce"
            )
            update = heartbeat.ProcessUpdate(
                key=process.key, lifecycle=3, step=entered, streams=(stream,)
            )
            beat = reporter.make_heartbeat(0, number, processes=(update,))
            return client.post("/api/v1/heartbeats", json=codec.encode_message(beat))

        def read_entered() -> int:
            rank = client.get("/api/v1/ranks", params={"job": "run7", "rank": 0}).json()["items"][0]
            return int(rank["groups"][0]["entered"])

        reporter.send_heartbeat()
        for number, entered_count in ((2, 20), (4, 40), (3, 30), (4, 40), (2, 20), (2, 20)):
            assert send_heartbeat(number, entered_count).status_code == 200
        assert read_entered() == 40
        whole = json.dumps(
            codec.encode_message(
                heartbeat.Heartbeat(
                    host=job.host,
                    agent=reporter.agent_id(),
                    number=5,
                    processes=(job.make_process_update(0, full=True),),
                )
            )
        ).encode()
        for cut in (1, len(whole) // 2, len(whole) - 1):
            check_problem(client.post("/api/v1/heartbeats", content=whole[:cut]), 422)
            packed = gzip.compress(whole)[: -cut or None]
            check_problem(
                client.post(
                    "/api/v1/heartbeats", content=packed, headers={"Content-Encoding": "gzip"}
                ),
                422,
            )
        half = httpx.URL(server.url)
        with socket.create_connection((half.host, half.port or 80)) as cut_off:
            cut_off.sendall(
                b"POST /api/v1/heartbeats HTTP/1.1\r\nHost: localhost\r\nContent-Length:"
                b" 1000\r\n\r\n" + whole[:100]
            )
        assert read_entered() == 40
        assert client.get("/api/v1/incidents").json()["items"] == []
        assert send_heartbeat(5, 50).status_code == 200
        assert read_entered() == 50


def test_late_agent_of_old_attempt_revives_nothing(tmp_path: Path) -> None:
    with (
        run_server(tmp_path, "--stall-after", STALL_AFTER_S) as server,
        open_client(server) as client,
    ):
        old = JobReporter(client, make_hung_job(hung_for_s=0.0), agent="old")
        old.send_heartbeat()
        rerun = SimulatedJob(ranks=4, host="node1", restart=1)
        new = JobReporter(client, rerun, agent="new")
        new.send_heartbeat()
        until = time.monotonic() + 5
        while time.monotonic() < until:
            old.send_heartbeat()
            new.send_heartbeat()
            time.sleep(0.2)
        [job] = client.get("/api/v1/jobs").json()["items"]
        assert (job["attempt"], job["states"]) == (1, {"running": 4})
        assert [i for i in new.list_incidents() if i["status"] == "open"] == []


def test_two_hundred_simultaneous_agents(tmp_path: Path) -> None:
    hosts = 200

    def make_heartbeat(host: int, number: int) -> dict[str, object]:
        identity = heartbeat.ProcessIdentity(
            job="large", rank=host, world_size=hosts, pid=host, start_ticks=1
        )
        update = heartbeat.ProcessUpdate(
            key=f"{host}-1", identity=identity, lifecycle=3, step=number
        )
        beat = heartbeat.Heartbeat(
            host=f"n{host}", agent=f"a{host}", number=number, full=number == 1, processes=(update,)
        )
        encoded: dict[str, object] = codec.encode_message(beat)
        return encoded

    async def run_agent(url: str, host: int) -> list[float]:
        async with httpx.AsyncClient(
            base_url=url, trust_env=False, timeout=60, verify=False
        ) as client:
            answers = [
                await client.post("/api/v1/heartbeats", json=make_heartbeat(host, number))
                for number in (1, 2, 3)
            ]
        assert [a.status_code for a in answers] == [200] * 3
        assert not any(a.json().get("resync") for a in answers)
        return [float(a.json().get("interval_s", 0.5)) for a in answers]

    async def run_agents(url: str) -> list[list[float]]:
        return await asyncio.gather(*(run_agent(url, host) for host in range(hosts)))

    with run_server(tmp_path) as server, open_client(server) as client:
        intervals = asyncio.run(run_agents(server.url))
        assert max(s for agent_intervals in intervals for s in agent_intervals) <= 4.05
        [job] = client.get("/api/v1/jobs").json()["items"]
        assert (
            job["reported_ranks"],
            job["step"],
            client.get("/api/v1/incidents").json()["items"],
        ) == (
            hosts,
            3,
            [],
        )


def test_overloaded_server_reduces_heartbeats_until_caught_up(
    tmp_path: Path,
) -> None:
    with run_server(tmp_path) as server, open_client(server) as client:
        reporter = JobReporter(client, SimulatedJob(ranks=4))

        def read_interval() -> float:
            return float(reporter.send_heartbeat().get("interval_s", 0.5))

        assert wait_until(lambda: read_interval() < 0.6, 30), "the interval is not the usual one"
        os.kill(server.pid, signal.SIGSTOP)
        time.sleep(3)
        os.kill(server.pid, signal.SIGCONT)
        assert wait_until(lambda: read_interval() > 1, 30), "the interval did not get longer"
        assert wait_until(lambda: read_interval() < 0.6, 30), "it did not get shorter again"
        [job] = client.get("/api/v1/jobs").json()["items"]
        assert job["reported_ranks"] == 4, "heartbeats were lost"


def test_silent_clients_block_no_others_and_are_disconnected(tmp_path: Path) -> None:
    with (
        run_server(tmp_path) as server,
        open_client(server) as client,
        contextlib.ExitStack() as opened,
    ):
        url = httpx.URL(server.url)
        idle = [
            opened.enter_context(socket.create_connection((url.host, url.port or 80)))
            for _ in range(200)
        ]
        for number, one in enumerate(idle):
            if number % 2:
                one.sendall(b"GET /ranks HTTP/1.1\r\nHost: loc")
        began = time.monotonic()
        JobReporter(client, SimulatedJob(ranks=4)).send_heartbeat()
        assert time.monotonic() - began < 5
        for one in idle:
            one.settimeout(30)
            assert one.recv(100) == b"", "closed by the server"
        assert client.get("/healthz").status_code == 200


def test_new_host_beyond_limit_is_refused(tmp_path: Path) -> None:
    with run_server(tmp_path) as server, open_client(server) as client:
        job = SimulatedJob(ranks=4, name="x" * 300)
        with pytest.raises(httpx.HTTPStatusError) as raised:
            JobReporter(client, job, agent="a").send_heartbeat()
        check_problem(raised.value.response, 422)
        (error,) = raised.value.response.json()["errors"]
        assert "length <= 256 - at `$.processes[0].identity.job`" in error["message"]
        process = job.make_process_update(0, full=True)
        channels = tuple(heartbeat.StreamUpdate(uid=uid, entered=1) for uid in range(20_000))
        many = heartbeat.ProcessUpdate(key=process.key, streams=channels)
        answer = client.post(
            "/api/v1/heartbeats",
            json=codec.encode_message(
                heartbeat.Heartbeat(host="n", agent="a", number=1, processes=(many,))
            ),
        )
        assert "at most 16384 process groups" in check_problem(answer, 413)
        assert os.path.exists(tmp_path / "data")


@pytest.mark.parametrize(
    ("name", "value"),
    [("restart", 2**63), ("restart", 2**31), ("pid", 2**64), ("started_s", 1e300)],
)
def test_number_out_of_bounds_stops_no_alert(tmp_path: Path, name: str, value: float) -> None:
    with (
        WebhookReceiver() as hook,
        run_server(tmp_path, "--stall-after", STALL_AFTER_S, "--alert", hook.url) as server,
        open_client(server) as client,
    ):
        bad = SimulatedJob(ranks=2, name="bad", host="bad")
        document: dict[str, Any] = codec.encode_message(
            JobReporter(client, bad).make_heartbeat(
                0, 1, full=True, processes=bad.make_process_updates(0, full=True)
            )
        )
        document["processes"][0]["identity"][name] = value
        for _ in range(3):
            assert client.post("/api/v1/heartbeats", json=document).status_code == 422
        reporter = JobReporter(client, make_hung_job())
        reporter.send_until(lambda: hook.requests, "the alert of the other job")
        assert client.get("/readyz").status_code == 200
