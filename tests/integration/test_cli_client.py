"""The commands against a small HTTP server that serves canned documents."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from hangwatch.agent.cli import main
from tests.simulation.waiting import wait_until

TOKEN = "s3cret"
INCIDENT_IDS = [
    "01JBBBBBBBBBBBBBBBBBBBBBBB",
    "01JAABBBBBBBBBBBBBBBBBBBBB",
    "01JAAABBBBBBBBBBBBBBBBBBBB",
]


def make_incident(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "id": name,
        "job": "run7",
        "attempt": 0,
        "kind": "missing_rank",
        "severity": "alert",
        "status": "open",
        "onset_at": "2026-11-21T09:00:48Z",
        "opened_at": "2026-11-21T09:00:50Z",
        "resolved_at": None,
        "summary": f"rank 2 is missing in {name}",
        "advice": "Look at rank 2.",
        "culprits": [2],
        "waiting": [0, 1, 3],
        "stacks": [make_stack(2)],
    } | changes


def make_stack(rank: int, function: str = "load_batch") -> dict[str, Any]:
    frames = [{"function": function, "file": "train.py", "line": 31}]
    return {
        "ranks": [rank],
        "thread": "MainThread",
        "source": "py-spy",
        "taken_at": "2026-11-21T09:00:51Z",
        "frames": frames,
    }


def make_dumped_rank(rank: int, status: str, **more: Any) -> dict[str, Any]:
    return {"rank": rank, "status": status, "error": None, "stacks": []} | more


class StubServer(ThreadingHTTPServer):
    """What is asked is kept in ``asked``; what is answered can be changed."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), StubHandler)
        self.requests: list[str] = []
        self.bodies: list[Any] = []
        self.token: str | None = None
        self.jobs = [
            {
                "job": "run7",
                "attempt": 0,
                "state": "stalled",
                "world_size": 4,
                "states": {"waiting": 3, "running": 1},
                "last_seen_s": 0.4,
            }
        ]
        self.incidents = [make_incident(name) for name in INCIDENT_IDS]
        self.dumps: list[dict[str, Any]] = []  # answered in turn, the last again and again

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class StubHandler(BaseHTTPRequestHandler):
    server: StubServer

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        self.server.requests.append(self.path)
        query = {k: v[0] for k, v in parse_qs(asked.query).items()}
        path = asked.path.removeprefix("/api/v1/")
        if self.server.token and self.headers.get("Authorization") != f"Bearer {self.server.token}":
            return self.send_json(401, {"title": "Unauthorized"})
        if path == "jobs":
            return self.send_page(self.server.jobs, query)
        if path == "incidents":
            return self.send_page(
                [i for i in self.server.incidents if query.get("status") in (None, i["status"])],
                query,
            )
        if path.startswith("incidents/"):
            found = [i for i in self.server.incidents if i["id"] == path.partition("/")[2]]
            return (
                self.send_json(200, found[0])
                if found
                else self.send_json(404, {"title": "Not Found", "detail": "no such incident"})
            )
        if path.startswith("dumps/"):
            return self.send_json(
                200,
                self.server.dumps.pop(0) if len(self.server.dumps) > 1 else self.server.dumps[0],
            )
        self.send_response(404)
        self.end_headers()
        self.wfile.write(b"<html>another server</html>")
        return None

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if not self.server.dumps:
            return self.send_json(
                404, {"title": "Not Found", "detail": "job run7 has no rank 9; it has ranks 0-3"}
            )
        return self.send_json(202, self.server.dumps[0])

    def send_page(self, items: list[dict[str, Any]], query: dict[str, str]) -> None:
        """Two at a time, so that whoever wants all must follow ``next``."""
        wanted = [i for i in items if query.get("job") in (None, i["job"])]
        start = int(query.get("after", 0))
        more = f"http://elsewhere.invalid/api/v1/{urlsplit(self.path).path.rpartition('/')[2]}?after={start + 2}"
        self.send_json(
            200,
            {"items": wanted[start : start + 2], "next": more if len(wanted) > start + 2 else None},
        )

    def send_json(self, code: int, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def date_time_string(self, timestamp: float | None = None) -> str:
        return "Sat, 21 Nov 2026 09:01:00 GMT"

    def log_message(self, *args: Any) -> None:
        """Nothing: pytest shows what matters."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubServer]:
    with StubServer() as made:
        thread = threading.Thread(
            target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        thread.start()
        monkeypatch.setenv("HANGWATCH_URL", made.url)
        monkeypatch.delenv("HANGWATCH_TOKEN", raising=False)
        yield made
        made.shutdown()
        thread.join()


CapturedOutput = pytest.CaptureFixture[str]


def test_status_shows_open_incidents_and_exits_with_4(
    server: StubServer, capsys: CapturedOutput
) -> None:
    assert main(["status"]) == 4
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "run7  stalled  4 ranks: 3 waiting, 1 running · heard 0.4 s ago"
    assert all(
        f"rank 2 is missing in {name}" in out for name in INCIDENT_IDS
    )  # three, on two pages
    assert "for 12 s" in out  # by the server's clock


def test_a_warning_or_nothing_open_is_healthy(server: StubServer, capsys: CapturedOutput) -> None:
    server.incidents = [
        make_incident(INCIDENT_IDS[0], severity="warning"),
        make_incident(INCIDENT_IDS[1], status="resolved"),
    ]
    assert main(["status"]) == 0
    assert "WARNING" in capsys.readouterr().out


def test_status_without_job_shows_how_to_start_one(
    server: StubServer, capsys: CapturedOutput
) -> None:
    server.jobs, server.incidents = [], []
    assert main(["status"]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert f"HANGWATCH_URL={server.url} torchrun" in said.err


def test_status_as_json(server: StubServer, capsys: CapturedOutput) -> None:
    assert main(["status", "--json"]) == 4
    document = json.loads(capsys.readouterr().out)
    assert document["jobs"] == server.jobs
    assert [i["id"] for i in document["incidents"]] == INCIDENT_IDS


@pytest.mark.parametrize("command", [["status"], ["incidents"], ["show"]])
def test_unknown_job_error_lists_known_jobs(
    server: StubServer, capsys: CapturedOutput, command: list[str]
) -> None:
    assert main([*command, "--job", "run8"]) == 1
    assert "no job 'run8' has reported; known: run7" in capsys.readouterr().err


def test_incidents_is_a_table_and_can_be_limited(
    server: StubServer, capsys: CapturedOutput
) -> None:
    assert main(["incidents", "--limit", "1"]) == 0
    out = capsys.readouterr().out
    assert INCIDENT_IDS[0][:10] in out
    assert INCIDENT_IDS[1][:10] not in out
    assert main(["incidents", "--kind", "mismatch"]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert "no incident matches" in said.err


def test_show_without_an_id_shows_the_newest(server: StubServer, capsys: CapturedOutput) -> None:
    assert main(["show"]) == 0
    out = capsys.readouterr().out
    assert INCIDENT_IDS[0] in out
    assert "> load_batch" in out
    assert "train.py:31" in out
    assert "\x1b" not in out


@pytest.mark.parametrize("beginning", [INCIDENT_IDS[1], "01JAAB", "01jaab"])
def test_show_accepts_id_or_prefix(
    server: StubServer, capsys: CapturedOutput, beginning: str
) -> None:
    assert main(["show", beginning]) == 0
    assert INCIDENT_IDS[1] in capsys.readouterr().out


def test_ambiguous_id_prefix_lists_matches(server: StubServer, capsys: CapturedOutput) -> None:
    assert main(["show", "01JAA"]) == 2
    err = capsys.readouterr().err
    assert INCIDENT_IDS[1] in err
    assert INCIDENT_IDS[2] in err
    assert INCIDENT_IDS[0] not in err


def test_unknown_incident_error_names_list_command(
    server: StubServer, capsys: CapturedOutput
) -> None:
    assert main(["show", "zz/../x?y"]) == 1
    assert "`hangwatch incidents` lists them" in capsys.readouterr().err


def test_show_as_json_is_the_document(server: StubServer, capsys: CapturedOutput) -> None:
    assert main(["show", INCIDENT_IDS[2], "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == server.incidents[2]


def test_dump_waits_and_merges_equal_stacks(server: StubServer, capsys: CapturedOutput) -> None:
    stacks = {0: make_stack(0, "step"), 1: make_stack(1), 3: make_stack(3, "step")}
    ranks = [make_dumped_rank(rank, "done", stacks=[told]) for rank, told in stacks.items()]
    pending = [make_dumped_rank(r, "pending") for r in (0, 1, 3)]
    server.dumps = [{"id": "d1", "status": "pending", "ranks": pending}] * 2 + [
        {"id": "d1", "status": "done", "ranks": ranks}
    ]
    assert main(["dump", "0-1,3", "--job", "run7"]) == 0
    assert server.bodies == [{"ranks": [0, 1, 3], "native": False, "job": "run7"}]
    out = capsys.readouterr().out
    assert "ranks 0, 3 · MainThread · py-spy" in out
    assert "rank 1 · MainThread · py-spy" in out


def test_failed_dump_shows_remedy_and_fails(server: StubServer, capsys: CapturedOutput) -> None:
    ranks = [
        make_dumped_rank(0, "done", stacks=[make_stack(0)]),
        make_dumped_rank(1, "failed", error="py-spy may not attach: add SYS_PTRACE"),
    ]
    server.dumps = [{"id": "d1", "status": "done", "ranks": ranks}]
    assert main(["dump", "0,1"]) == 1
    assert "! py-spy may not attach: add SYS_PTRACE" in capsys.readouterr().out


def test_missing_dump_is_reported(server: StubServer, capsys: CapturedOutput) -> None:
    server.dumps = [
        {
            "id": "d1",
            "status": "pending",
            "ranks": [make_dumped_rank(0, "pending"), make_dumped_rank(2, "pending")],
        }
    ]
    assert main(["dump", "0,2", "--timeout", "1"]) == 1
    assert "ranks 0, 2 returned no stacks within 1 s" in capsys.readouterr().err


def test_unknown_rank_is_reported_by_server(server: StubServer, capsys: CapturedOutput) -> None:
    assert main(["dump", "9"]) == 1
    assert "job run7 has no rank 9; it has ranks 0-3" in capsys.readouterr().err


def test_token_grants_access(
    server: StubServer, capsys: CapturedOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.token = TOKEN
    assert main(["status"]) == 1
    assert "wants a token: give --token, HANGWATCH_TOKEN" in capsys.readouterr().err
    assert main(["status", "--token", "wrong"]) == 1
    assert "refuses the token" in capsys.readouterr().err
    monkeypatch.setenv("HANGWATCH_URL", server.url.replace("://", f"://:{TOKEN}@"))
    assert (
        main(["status"]) == 4
    )  # three pages, each with the token, though `next` names another host
    said = capsys.readouterr()
    assert TOKEN not in said.out + said.err


def test_foreign_server_is_recognised(server: StubServer, capsys: CapturedOutput) -> None:
    assert main(["status", "--url", server.url + "/elsewhere"]) == 1
    assert "not as a hangwatch-server does" in capsys.readouterr().err


def test_server_text_is_sanitized_for_terminal(server: StubServer, capsys: CapturedOutput) -> None:
    server.jobs[0]["job"] = "\x1b]0;title\x07run\x1b[2J9"
    assert main(["status", "--job", "run8"]) == 1
    assert "known: run9" in capsys.readouterr().err


def test_unreachable_server_exits_with_3(capsys: CapturedOutput) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: refuses
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert main(["status", "--url", url]) == 3
    err = capsys.readouterr().err
    assert f"cannot reach {url}" in err
    assert "Start `hangwatch-server` there" in err


def test_no_url_is_exit_2(capsys: CapturedOutput) -> None:
    assert main(["status", "--url", "master:8642"]) == 2
    assert "should look like http://master:8642" in capsys.readouterr().err


def test_watching_ends_with_ctrl_c_and_the_last_state(server: StubServer) -> None:
    env = os.environ | {"HANGWATCH_URL": server.url}
    command = [sys.executable, "-m", "hangwatch.agent.cli", "status", "--watch"]
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as watching:
        # Each refresh sends three requests: with the seventh, two states have been printed.
        wait_until(lambda: len(server.requests) >= 7, 20)
        watching.send_signal(signal.SIGINT)
        out, err = watching.communicate(timeout=10)
    assert watching.returncode == 4, err
    assert out.count("run7  stalled") >= 2
    assert err == ""


def test_closed_pipe_gives_no_traceback(server: StubServer) -> None:
    server.incidents = [make_incident(f"01J{n:023}", summary="word " * 500) for n in range(40)]
    command = f"{sys.executable} -m hangwatch.agent.cli status | head -n 1"
    ended = subprocess.run(
        ["bash", "-c", command],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert ended.stdout.startswith("run7")
    assert ended.stderr == ""
