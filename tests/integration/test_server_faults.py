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

import httpx
import pytest

from hangwatch.protocol import heartbeat
from tests.harness.receiver import Hook, receiving

from .test_server_http import Job, Server, eventually, problem, serving

SOON = "2"  # --stall-after


@contextlib.contextmanager
def talking(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, trust_env=False, timeout=20) as client:
        yield client


def kill(server: Server) -> None:
    server.process.send_signal(signal.SIGKILL)
    server.process.wait(15)


def test_a_killed_server_comes_back_with_the_same_incident_and_no_second_alert(
    tmp_path: Path,
) -> None:
    with receiving(Hook()) as hook:
        flags = ["--stall-after", SOON, "--alert", hook.url]
        with serving(tmp_path, *flags) as first, talking(first) as client:
            job = Job(client, began=time.monotonic() - 2)
            Job(client, name="rerun", hangs=False, agent="r1", restart=1).beat()
            Job(client, name="rerun", hangs=False, agent="r1", number=1, restart=3).beat()
            job.beating(lambda: hook.got, "the alert")
            [opened] = job.incidents()
            time.sleep(0.3)  # within a second of the alert
            kill(first)
        with serving(tmp_path, *flags) as second, talking(second) as client:
            [kept] = client.get("/api/v1/incidents").json()["items"]
            assert (kept["id"], kept["status"], kept["culprits"]) == (opened["id"], "open", [2])
            past = client.get("/api/v1/attempts", params={"job": "run7"}).json()["items"]
            assert [(a["attempt"], a["world_size"], a["hosts"]) for a in past] == [
                (0, 4, ["node1"])
            ]
            job.client = client
            Job(
                client,
                name="rerun",
                hangs=False,
                agent="r2",
                restart=3,
                began=time.monotonic() - 60,
            ).beat()
            assert (
                client.get("/api/v1/jobs", params={"job": "rerun"}).json()["items"][0]["attempt"]
                == 3
            )
            job.beating(
                lambda: [i for i in job.incidents() if i["stacks"] and i["waiting"] == [0, 1, 3]],
                "evidence anew",
            )
            kill(second)
        with serving(tmp_path, *flags) as third, talking(third) as client:
            job.client, job.hangs = client, False
            job.beating(
                lambda: [i for i in job.incidents() if i["status"] == "resolved"], "its resolution"
            )
            eventually(lambda: len(hook.got) > 1, "the message that it is over")
            assert [i["id"] for i in job.incidents()] == [opened["id"]]
        assert hook.events == ["opened", "resolved"]
        log = (tmp_path / "err").read_text()
        assert (log.count("ALERT job"), log.count("RESOLVED after")) == (1, 1)


def test_an_alert_that_could_not_be_sent_is_sent_by_the_server_after_it(tmp_path: Path) -> None:
    with receiving(Hook([503])) as hook:
        flags = ["--stall-after", SOON, "--alert", hook.url]
        with serving(tmp_path, *flags) as first, talking(first) as client:
            Job(client, began=time.monotonic() - 2).beating(lambda: hook.got, "the first try")
            kill(first)
        hook.statuses, before = [204], len(hook.got)
        with serving(tmp_path, *flags):
            eventually(lambda: len(hook.got) > before, "the next one")
        assert {headers["webhook-id"] for headers, _ in hook.got} == {hook.got[0][0]["webhook-id"]}


def test_a_full_disk_holds_up_no_alert_and_nothing_is_lost(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "hangwatch-test", str(data)]
    if (mounted := subprocess.run(command, capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"needs to mount a tmpfs, as root: {mounted.stderr.strip()}")
    try:
        with (
            receiving(Hook()) as hook,
            serving(tmp_path, "--stall-after", SOON, "--alert", hook.url) as server,
            talking(server) as client,
        ):
            filler = data / "filler"
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(b"\0" * 4096)
            job = Job(client, began=time.monotonic() - 2)
            job.beating(lambda: hook.got, "the alert in spite of it")
            job.beating(lambda: client.get("/readyz").status_code == 503, "that it is not ready")
            assert "disk" in problem(client.get("/readyz"), 503)
            assert len(job.incidents()) == 1
            filler.unlink()
            job.beating(lambda: client.get("/readyz").status_code == 200, "that it is ready again")
            kill(server)
        with serving(tmp_path, "--stall-after", SOON) as again, talking(again) as client:
            [kept] = client.get("/api/v1/incidents").json()["items"]
            assert kept["culprits"] == [2]
        assert hook.events == ["opened"]
    finally:
        subprocess.run(["umount", "--lazy", str(data)], check=True)


def test_heartbeats_that_come_again_late_or_in_pieces_change_nothing(tmp_path: Path) -> None:
    with serving(tmp_path, "--stall-after", "60") as server, talking(server) as client:
        job = Job(client, hangs=False)

        def beat(number: int, entered: int) -> httpx.Response:
            process = job._process(0)
            sequence = heartbeat.StreamUpdate(
                uid=1, entered=entered, completed=entered, op="all_reduce"
            )
            update = heartbeat.ProcessUpdate(
                key=process.key, lifecycle=3, step=entered, sequences=(sequence,)
            )
            told = heartbeat.Heartbeat(
                host="node1", agent=job.agent, number=number, processes=(update,)
            )
            return client.post("/api/v1/heartbeats", json=heartbeat.encode_message(told))

        def entered() -> int:
            rank = client.get("/api/v1/ranks", params={"job": "run7", "rank": 0}).json()["items"][0]
            return int(rank["groups"][0]["entered"])

        job.beat()
        for number, told in ((2, 20), (4, 40), (3, 30), (4, 40), (2, 20), (2, 20)):
            assert beat(number, told).status_code == 200
        assert entered() == 40
        whole = json.dumps(
            heartbeat.encode_message(
                heartbeat.Heartbeat(
                    host="node1", agent=job.agent, number=5, processes=(job._process(0),)
                )
            )
        ).encode()
        for cut in (1, len(whole) // 2, len(whole) - 1):
            problem(client.post("/api/v1/heartbeats", content=whole[:cut]), 422)
            packed = gzip.compress(whole)[: -cut or None]
            problem(
                client.post(
                    "/api/v1/heartbeats", content=packed, headers={"Content-Encoding": "gzip"}
                ),
                422,
            )
        half = httpx.URL(server.url)
        with socket.create_connection((half.host, half.port)) as cut_off:
            cut_off.sendall(
                b"POST /api/v1/heartbeats HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
                + whole[:100]
            )
        assert entered() == 40
        assert client.get("/api/v1/incidents").json()["items"] == []
        assert beat(5, 50).status_code == 200
        assert entered() == 50


def test_an_old_attempts_agent_that_still_talks_revives_nothing(tmp_path: Path) -> None:
    with serving(tmp_path, "--stall-after", SOON) as server, talking(server) as client:
        old = Job(client, hangs=True, agent="old", began=time.monotonic())
        old.beat()
        new = Job(client, hangs=False, agent="new", restart=1)
        new.beat()
        until = time.monotonic() + 5
        while time.monotonic() < until:
            old.beat()
            new.beat()
            time.sleep(0.2)
        [job] = client.get("/api/v1/jobs").json()["items"]
        assert (job["attempt"], job["states"]) == (1, {"running": 4})
        assert [i for i in new.incidents() if i["status"] == "open"] == []


def test_two_hundred_agents_at_once(tmp_path: Path) -> None:
    hosts = 200

    def beat(host: int, number: int) -> dict[str, object]:
        identity = heartbeat.ProcessIdentity(
            job="large", rank=host, world_size=hosts, pid=host, start_ticks=1
        )
        update = heartbeat.ProcessUpdate(
            key=f"{host}-1", identity=identity, lifecycle=3, step=number
        )
        told = heartbeat.Heartbeat(
            host=f"n{host}", agent=f"a{host}", number=number, full=number == 1, processes=(update,)
        )
        encoded: dict[str, object] = heartbeat.encode_message(told)
        return encoded

    async def agent(url: str, host: int) -> list[float]:
        async with httpx.AsyncClient(
            base_url=url, trust_env=False, timeout=60, verify=False
        ) as client:
            answers = [
                await client.post("/api/v1/heartbeats", json=beat(host, number))
                for number in (1, 2, 3)
            ]
        assert [a.status_code for a in answers] == [200] * 3
        assert not any(a.json().get("resync") for a in answers)
        return [float(a.json().get("interval_s", 0.5)) for a in answers]

    async def crowd(url: str) -> list[list[float]]:
        return await asyncio.gather(*(agent(url, host) for host in range(hosts)))

    with serving(tmp_path) as server, talking(server) as client:
        intervals = asyncio.run(crowd(server.url))
        assert max(i for told in intervals for i in told) <= 4.05
        [job] = client.get("/api/v1/jobs").json()["items"]
        assert (job["heard_of"], job["step"], client.get("/api/v1/incidents").json()["items"]) == (
            hosts,
            3,
            [],
        )


def test_a_server_that_is_late_asks_for_fewer_heartbeats_until_it_has_caught_up(
    tmp_path: Path,
) -> None:
    with serving(tmp_path) as server, talking(server) as client:
        job = Job(client, hangs=False)

        def interval() -> float:
            return float(job.beat().get("interval_s", 0.5))

        eventually(lambda: interval() < 0.6, "the usual interval")
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(3)
        server.process.send_signal(signal.SIGCONT)
        eventually(lambda: interval() > 1, "a longer interval")
        eventually(lambda: interval() < 0.6, "the usual one again")


def test_clients_that_say_nothing_hold_up_nobody_and_are_shown_out(tmp_path: Path) -> None:
    with serving(tmp_path) as server, talking(server) as client, contextlib.ExitStack() as opened:
        url = httpx.URL(server.url)
        idle = [
            opened.enter_context(socket.create_connection((url.host, url.port))) for _ in range(200)
        ]
        for number, one in enumerate(idle):
            if number % 2:
                one.sendall(b"GET /ranks HTTP/1.1\r\nHost: loc")
        began = time.monotonic()
        Job(client, hangs=False).beat()
        assert time.monotonic() - began < 5
        for one in idle:
            one.settimeout(30)
            assert one.recv(100) == b"", "closed by the server"
        assert client.get("/healthz").status_code == 200


def test_a_new_host_beyond_the_limit_is_told_so(tmp_path: Path) -> None:
    with serving(tmp_path) as server, talking(server) as client:
        job = Job(client, name="x" * 300, hangs=False)
        with pytest.raises(httpx.HTTPStatusError) as told:
            job.beat()
        assert "256 printable characters" in problem(told.value.response, 422)
        process = job._process(0)
        channels = tuple(heartbeat.StreamUpdate(uid=uid, entered=1) for uid in range(20_000))
        many = heartbeat.ProcessUpdate(key=process.key, sequences=channels)
        answer = client.post(
            "/api/v1/heartbeats",
            json=heartbeat.encode_message(
                heartbeat.Heartbeat(host="n", agent="a", number=1, processes=(many,))
            ),
        )
        assert "more than 16384 process groups" in problem(answer, 413)
        assert os.path.exists(tmp_path / "data")
