"""A real `hangwatch-server` over sockets, with heartbeats of simulated jobs."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import re
import socket
import subprocess
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hangwatch.protocol import codec, heartbeat
from tests.harness.problems import check_problem
from tests.harness.processes import clean_environment
from tests.harness.server import COMMAND, Server, run_server
from tests.simulation.http_receiver import WebhookReceiver
from tests.simulation.job_reporter import JobReporter, post_heartbeat
from tests.simulation.simulated_job import SimulatedJob, make_hung_job
from tests.simulation.waiting import wait_for_value

_run_numbers = itertools.count(7)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with run_server(tmp_path_factory.mktemp("server"), "--stall-after", "2") as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, trust_env=False, timeout=10) as made:
        yield made


@pytest.fixture
def reporter(client: httpx.Client) -> JobReporter:
    """A reporter of a job that the server knows, with a name and a host that no other test uses."""
    number = next(_run_numbers)
    job = make_hung_job(hung_for_s=1.0, name=f"run{number}", host=f"node{number}")
    reporter = JobReporter(client, job)
    reporter.send_until(
        lambda: client.get("/api/v1/ranks", params={"job": job.name}).is_success,
        "the job is known",
    )
    return reporter


@pytest.fixture
def hang(reporter: JobReporter) -> dict[str, Any]:
    """The open incident of the test's job, with its culprit's stack."""

    def find_complete_incident() -> dict[str, Any] | None:
        open_incidents = [i for i in reporter.list_incidents() if i["status"] == "open"]
        return (
            open_incidents[0] if open_incidents and len(open_incidents[0]["stacks"]) == 2 else None
        )

    reporter.send_until(find_complete_incident, "an incident with stacks")
    return reporter.list_incidents()[0]


def test_one_late_rank_is_one_incident_that_names_it(
    reporter: JobReporter, hang: dict[str, Any], server: Server, client: httpx.Client
) -> None:
    assert (hang["kind"], hang["severity"], hang["culprits"], hang["waiting"]) == (
        "missing_rank",
        "alert",
        [2],
        [0, 1, 3],
    )
    assert (hang["group"]["desc"], hang["seq"]) == ("default_pg", 7)
    assert [(s["ranks"], s["frames"][0]["line"]) for s in hang["stacks"]] == [
        ([2], 44),
        ([0, 1, 3], 52),
    ]
    assert (hang["site"]["file"], hang["site"]["line"]) == ("/u/train.py", 44)
    assert hang["onset_at"] < hang["opened_at"]
    assert hang["onset_at"].endswith("Z")
    assert client.get(f"/api/v1/incidents/{hang['id']}").json()["id"] == hang["id"]
    line = wait_for_value(
        lambda: re.search(
            rf"hangwatch: ALERT job {reporter.job.name}: .*rank 2.*", server.read_log()
        ),
        "the alert line",
    )
    assert f"/incidents/{hang['id']}" in line.group(0)
    assert (
        len(
            client.get(
                "/api/v1/incidents", params={"job": reporter.job.name, "status": "open"}
            ).json()["items"]
        )
        == 1
    )


def test_lists_support_filters_and_paging(
    reporter: JobReporter, hang: dict[str, Any], client: httpx.Client
) -> None:
    ranks = client.get("/api/v1/ranks", params={"job": reporter.job.name}).json()
    assert [(r["rank"], r["state"], r["host"], r["step"]) for r in ranks["items"]] == [
        (r, "stalled", reporter.job.host, 812) for r in range(4)
    ]
    assert ranks["items"][0]["groups"][0]["entered"] == 7
    seen, at = [], f"/api/v1/ranks?job={reporter.job.name}&limit=3"
    while at:
        part = client.get(at).json()
        seen += [r["rank"] for r in part["items"]]
        at = part["next"]
    assert seen == [0, 1, 2, 3]
    [job] = client.get("/api/v1/jobs", params={"job": reporter.job.name}).json()["items"]
    assert (job["state"], job["open_incidents"], job["states"]) == ("stalled", 1, {"stalled": 4})
    [group] = client.get("/api/v1/groups", params={"job": reporter.job.name, "rank": 2}).json()[
        "items"
    ]
    assert [m["entered"] for m in group["members"]] == [7, 7, 6, 7]
    assert client.get("/api/v1/incidents", params={"rank": 9}).json() == {"items": [], "next": None}


def test_a_bundle_is_one_archive(hang: dict[str, Any], client: httpx.Client) -> None:
    answer = client.get(f"/api/v1/incidents/{hang['id']}/bundle").raise_for_status()
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        assert json.loads(archive.read("incident.json"))["culprits"] == [2]
        assert len(json.loads(archive.read("ranks.json"))) == 4
        assert b"load_batch (/u/train.py:44)" in archive.read("stacks.txt")


def test_pages_for_people_and_json_at_the_same_address(
    reporter: JobReporter, hang: dict[str, Any], client: httpx.Client
) -> None:
    for path in (f"/ranks?job={reporter.job.name}", "/incidents", f"/incidents/{hang['id']}"):
        page = client.get(path, headers={"Accept": "text/html,*/*;q=0.8"})
        assert page.status_code == 200
        assert "text/html" in page.headers["content-type"]
        assert "rank 2 has not entered" in page.text
        assert "default-src 'self'" in page.headers["content-security-policy"]
        assert not re.search(r"<style|style=|<script>|\bon\w+=", page.text)
        twin = client.get(path, headers={"Accept": "application/json"})
        assert twin.headers["content-type"] == "application/json"
    assert (
        client.get(f"/incidents/{hang['id']}", headers={"Accept": "application/json"}).json()["id"]
        == hang["id"]
    )
    assert "text/html" in client.get("/ranks").headers["content-type"]
    assert client.get("/").headers["location"] == "/ranks"
    assert (
        "stalled" in client.get(f"/ranks?job={reporter.job.name}&state=stalled&sort=waiting").text
    )
    assert "No ranks match" in client.get(f"/ranks?job={reporter.job.name}&state=frozen").text
    for path in (
        "/static/app.js",
        "/static/hangwatch.css",
        "/docs",
        "/openapi.json",
        "/metrics",
        "/healthz",
        "/readyz",
    ):
        assert client.get(path).status_code == 200, path
    assert (
        f'hangwatch_incidents_open{{kind="missing_rank",severity="alert",training_job="{reporter.job.name}"}} 1.0'
        in client.get("/metrics").text
    )


def test_job_text_is_never_markup(client: httpx.Client) -> None:
    name = "<script>alert(1)</script>"
    job = SimulatedJob(ranks=4, name=name, host="node-x", restart=3)
    page = JobReporter(client, job).send_until(
        lambda: (
            answer if (answer := client.get("/ranks", params={"job": name})).is_success else None
        ),
        "its page",
    )
    assert name not in page.text
    assert "&lt;script&gt;" in page.text


def test_errors_are_problem_documents_with_the_remedy(
    reporter: JobReporter, client: httpx.Client
) -> None:
    assert "/docs" in check_problem(client.get("/nope"), 404)
    assert "GET" not in check_problem(client.delete("/api/v1/jobs"), 405)
    assert reporter.job.name in check_problem(
        client.get("/api/v1/ranks", params={"job": "other"}), 404
    )
    check_problem(client.get("/api/v1/ranks", params={"limit": "x"}), 422)
    check_problem(client.get("/api/v1/ranks", params={"after": "gone"}), 422)
    check_problem(client.get("/api/v1/incidents/x"), 404)
    check_problem(client.get("/api/v1/dumps/x"), 404)
    assert "Not Found" in client.get("/incidents/x", headers={"Accept": "text/html"}).text


def test_malformed_heartbeat_is_refused_and_counted(
    reporter: JobReporter, client: httpx.Client
) -> None:
    def read_refused_count() -> float:
        match = re.search(
            r"^hangwatch_heartbeats_malformed_total (\S+)",
            client.get("/metrics").text,
            re.MULTILINE,
        )
        assert match is not None
        return float(match.group(1))

    before = read_refused_count()
    good = codec.encode_message(reporter.job.make_process_update(0, full=True))
    bodies: list[bytes] = [
        b"",
        b"{",
        b"[]",
        json.dumps(
            {"host": reporter.job.host, "agent": "z", "number": 1, "processes": [good, {}]}
        ).encode(),
    ]
    for body in bodies:
        check_problem(client.post("/api/v1/heartbeats", content=body), 422)
    check_problem(client.post("/api/v1/heartbeats", content=b"x" * (17 << 20)), 413)
    check_problem(
        client.post("/api/v1/heartbeats", content=b"{}", headers={"Content-Encoding": "br"}), 415
    )
    assert read_refused_count() == before + len(bodies) + 2
    assert len(client.get("/api/v1/ranks", params={"job": reporter.job.name}).json()["items"]) == 4
    packed = gzip.compress(
        json.dumps({"host": reporter.job.host, "agent": "z", "number": 1}).encode()
    )
    assert (
        client.post(
            "/api/v1/heartbeats", content=packed, headers={"Content-Encoding": "gzip"}
        ).status_code
        == 200
    )


def test_unknown_agent_is_requested_to_resync(client: httpx.Client) -> None:
    unknown = heartbeat.Heartbeat(host="node9", agent="old", number=41)
    assert post_heartbeat(client, unknown)["resync"] is True
    full = heartbeat.Heartbeat(host="node9", agent="old", number=42, full=True)
    assert "resync" not in post_heartbeat(client, full)


def test_dump_request_and_result(
    client: httpx.Client, reporter: JobReporter, hang: dict[str, Any]
) -> None:
    assert reporter.job.name in check_problem(
        client.post("/api/v1/dumps", json={"job": "other", "ranks": [0]}), 404
    )
    assert "9" in check_problem(
        client.post("/api/v1/dumps", json={"job": reporter.job.name, "ranks": [1, 9]}), 404
    )
    check_problem(client.post("/api/v1/dumps", json={"job": reporter.job.name, "ranks": []}), 422)
    response = client.post("/api/v1/dumps", json={"job": reporter.job.name, "ranks": [2, 0]})
    assert response.status_code == 202

    def get_finished_dump() -> dict[str, Any] | None:
        dump: dict[str, Any] = client.get(response.headers["location"]).json()
        return dump if dump["status"] == "done" else None

    finished_dump = reporter.send_until(get_finished_dump, "the dump's answer")
    assert [
        (r["rank"], r["status"], r["stacks"][0]["frames"][0]["function"])
        for r in finished_dump["ranks"]
    ] == [
        (2, "done", "load_batch"),
        (0, "done", "step"),
    ]


def test_events_stream_live_and_resume(client: httpx.Client, hang: dict[str, Any]) -> None:
    def read_events(headers: dict[str, str], count: int) -> list[str]:
        lines = []
        with client.stream("GET", "/api/v1/events", headers=headers) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            for line in answer.iter_lines():
                lines.append(line)
                if sum(one.startswith("id:") for one in lines) > count:
                    break
        return lines

    reset = read_events({"Last-Event-ID": "unknown-1"}, 0)
    run = (
        next(line for line in reset if line.startswith("id:"))
        .removeprefix("id: ")
        .rpartition("-")[0]
    )
    lines = read_events({"Last-Event-ID": f"{run}-0"}, 2)
    assert "event: rank" in lines
    assert f"id: {run}-1" in lines


def test_resolved_hang_closes_and_open_one_survives_restart(
    tmp_path: Path,
) -> None:
    with (
        run_server(tmp_path, "--stall-after", "2") as first,
        httpx.Client(base_url=first.url, trust_env=False) as client,
    ):
        reporter = JobReporter(client, make_hung_job())
        [opened] = reporter.send_until(reporter.list_incidents, "an incident")
        wait_for_value(lambda: "ALERT" in first.read_log(), "the alert")
        assert first.stop() == 0
    with (
        run_server(tmp_path, "--stall-after", "2") as second,
        httpx.Client(base_url=second.url, trust_env=False) as client,
    ):
        [kept] = client.get("/api/v1/incidents").json()["items"]
        assert (kept["id"], kept["status"]) == (opened["id"], "open")
        reporter.client = client
        reporter.send_heartbeat()
        assert reporter.resync_count == 1
        reporter.send_until(
            lambda: [i for i in reporter.list_incidents() if i["stacks"]], "new evidence"
        )
        assert [i["id"] for i in reporter.list_incidents()] == [opened["id"]]
        reporter.job.resume_training()
        reporter.send_until(
            lambda: [i for i in reporter.list_incidents() if i["status"] == "resolved"],
            "its resolution",
        )
        assert second.read_log().count("ALERT") == 1
        states = {r["state"] for r in client.get("/api/v1/ranks").json()["items"]}
        assert states == {"running"}
        assert "All is well" in client.get("/ranks").text
        assert second.stop() == 0


def test_alerts_are_posted_once_and_shutdown_ignores_open_streams(
    tmp_path: Path,
) -> None:
    with WebhookReceiver() as hook:
        flags = ["--stall-after", "2", "--alert", hook.url, "--alert", "http://127.0.0.1:1/"]
        with (
            run_server(tmp_path, *flags) as running,
            httpx.Client(base_url=running.url, trust_env=False) as client,
        ):
            reporter = JobReporter(client, make_hung_job())
            reporter.send_until(lambda: hook.requests, "the alert's POST")
            for _ in range(10):
                reporter.send_heartbeat()
            with client.stream("GET", "/api/v1/events") as stream:
                next(stream.iter_lines())
                began = time.monotonic()
                assert running.stop() == 0
                assert time.monotonic() - began < 8
    [request] = hook.requests
    alert = request.parse_json()
    assert (alert["culprits"], alert["kind"]) == ([2], "missing_rank")
    assert alert["stacks"] != []
    assert alert["url"].endswith(f"/incidents/{alert['id']}")
    assert "rank 2" in alert["text"]


def test_non_loopback_server_generates_and_requires_token(tmp_path: Path) -> None:
    with run_server(tmp_path, "--host", "0.0.0.0") as running:
        assert re.fullmatch(r"HANGWATCH_URL=http://:[\w-]{20,}@[^@:]+:\d+", running.url_line)
        with_token = httpx.URL(running.loopback_url)
        token = with_token.password
        bare = f"http://127.0.0.1:{with_token.port}"
        described = httpx.get(f"{running.loopback_url}/openapi.json", trust_env=False).json()[
            "paths"
        ]
        paths = [re.sub(r"{\w+}", "x", p) for p in described] + [
            "/",
            "/ranks",
            "/incidents",
            "/docs",
            "/static/hangwatch.css",
            "/nope",
        ]
        with httpx.Client(base_url=bare, trust_env=False) as client:
            for path in paths:
                answer = client.get(path)
                if path in ("/healthz", "/readyz"):
                    assert answer.status_code == 200
                else:
                    check_problem(answer, 401)
                    assert answer.headers["www-authenticate"].startswith("Bearer")
            check_problem(client.post("/api/v1/heartbeats", content=b"{}"), 401)
            assert (
                client.get("/api/v1/jobs", headers={"Authorization": f"Bearer {token}"}).status_code
                == 200
            )
            assert client.get("/api/v1/jobs", auth=("", token)).status_code == 200
            _sign_in(client, token)
    assert token not in running.read_log()
    with run_server(tmp_path, "--host", "0.0.0.0") as again:
        assert httpx.URL(again.url).password == token


def _sign_in(client: httpx.Client, token: str) -> None:
    browser = {"Accept": "text/html"}
    sent = client.get("/ranks?job=a", headers=browser)
    assert (sent.status_code, sent.headers["location"]) == (303, "/login?next=/ranks%3Fjob%3Da")
    form = client.get(sent.headers["location"], headers=browser)
    assert 'name="token"' in form.text
    assert client.get("/login/style.css").status_code == 200
    assert client.post("/login", data={"token": "wrong"}).status_code == 401
    away = client.post("/login", data={"token": token, "next": "//evil.example"})
    assert away.headers["location"] == "/"
    client.cookies.clear()
    done = client.post("/login", data={"token": token, "next": "/ranks"})
    cookie = done.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=lax" in cookie.lower()
    assert token not in cookie
    assert client.get("/ranks", headers=browser).status_code == 200


def _run_server_command(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *argv],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=cwd,
        env=clean_environment(),
        check=False,
    )


def test_startup_errors_name_the_remedy(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        used = _run_server_command(
            "--port", str(taken.getsockname()[1]), "--data-dir", str(tmp_path / "d"), cwd=tmp_path
        )
    assert (used.returncode, used.stdout) == (3, "")
    assert "in use" in used.stderr
    assert "--port" in used.stderr
    (tmp_path / "file").write_text("")
    unwritable = _run_server_command(
        "--port", "0", "--data-dir", str(tmp_path / "file" / "d"), cwd=tmp_path
    )
    assert (unwritable.returncode, unwritable.stdout) == (3, "")
    assert "--data-dir" in unwritable.stderr
    bad = _run_server_command("--port", "x", cwd=tmp_path)
    assert bad.returncode == 2
    assert "--port" in bad.stderr
    assert "Traceback" not in used.stderr + unwritable.stderr + bad.stderr
    assert _run_server_command("--version", cwd=tmp_path).stdout.startswith("hangwatch ")
