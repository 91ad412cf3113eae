"""The commands against a small HTTP server that serves canned documents."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from hangwatch.agent.cli import main

TOKEN = "s3cret"
IDS = ["01JBBBBBBBBBBBBBBBBBBBBBBB", "01JAABBBBBBBBBBBBBBBBBBBBB", "01JAAABBBBBBBBBBBBBBBBBBBB"]


def incident(name: str, **changes: Any) -> dict[str, Any]:
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
        "stacks": [stack(2)],
    } | changes


def stack(rank: int, function: str = "load_batch") -> dict[str, Any]:
    frames = [{"function": function, "file": "train.py", "line": 31}]
    return {
        "ranks": [rank],
        "thread": "MainThread",
        "source": "py-spy",
        "taken_at": "2026-11-21T09:00:51Z",
        "frames": frames,
    }


def dumped(rank: int, status: str, **more: Any) -> dict[str, Any]:
    return {"rank": rank, "status": status, "error": None, "stacks": []} | more


class Server(ThreadingHTTPServer):
    """What is asked is kept in ``asked``; what is answered can be changed."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []
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
        self.incidents = [incident(name) for name in IDS]
        self.dumps: list[dict[str, Any]] = []  # answered in turn, the last again and again

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        self.server.asked.append(self.path)
        query = {k: v[0] for k, v in parse_qs(asked.query).items()}
        path = asked.path.removeprefix("/api/v1/")
        if self.server.token and self.headers.get("Authorization") != f"Bearer {self.server.token}":
            return self.answer(401, {"title": "Unauthorized"})
        if path == "jobs":
            return self.page(self.server.jobs, query)
        if path == "incidents":
            return self.page(
                [i for i in self.server.incidents if query.get("status") in (None, i["status"])],
                query,
            )
        if path.startswith("incidents/"):
            found = [i for i in self.server.incidents if i["id"] == path.partition("/")[2]]
            return (
                self.answer(200, found[0])
                if found
                else self.answer(404, {"title": "Not Found", "detail": "no such incident"})
            )
        if path.startswith("dumps/"):
            return self.answer(
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
            return self.answer(
                404, {"title": "Not Found", "detail": "job run7 has no rank 9; it has ranks 0-3"}
            )
        return self.answer(202, self.server.dumps[0])

    def page(self, items: list[dict[str, Any]], query: dict[str, str]) -> None:
        """Two at a time, so that whoever wants all must follow ``next``."""
        wanted = [i for i in items if query.get("job") in (None, i["job"])]
        start = int(query.get("after", 0))
        more = f"http://elsewhere.invalid/api/v1/{urlsplit(self.path).path.rpartition('/')[2]}?after={start + 2}"
        self.answer(
            200,
            {"items": wanted[start : start + 2], "next": more if len(wanted) > start + 2 else None},
        )

    def answer(self, code: int, document: dict[str, Any]) -> None:
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
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with Server() as made:
        thread = threading.Thread(
            target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        thread.start()
        monkeypatch.setenv("HANGWATCH_URL", made.url)
        monkeypatch.delenv("HANGWATCH_TOKEN", raising=False)
        yield made
        made.shutdown()
        thread.join()


Said = pytest.CaptureFixture[str]


def test_status_says_what_is_open_and_exits_with_4(server: Server, capsys: Said) -> None:
    assert main(["status"]) == 4
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "run7  stalled  4 ranks: 3 waiting, 1 running · heard 0.4 s ago"
    assert all(f"rank 2 is missing in {name}" in out for name in IDS)  # three, on two pages
    assert "for 12 s" in out  # by the server's clock


def test_a_warning_or_nothing_open_is_healthy(server: Server, capsys: Said) -> None:
    server.incidents = [incident(IDS[0], severity="warning"), incident(IDS[1], status="resolved")]
    assert main(["status"]) == 0
    assert "WARNING" in capsys.readouterr().out


def test_status_without_a_job_says_how_to_start_one(server: Server, capsys: Said) -> None:
    server.jobs, server.incidents = [], []
    assert main(["status"]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert f"HANGWATCH_URL={server.url} torchrun" in said.err


def test_status_as_json(server: Server, capsys: Said) -> None:
    assert main(["status", "--json"]) == 4
    document = json.loads(capsys.readouterr().out)
    assert document["jobs"] == server.jobs
    assert [i["id"] for i in document["incidents"]] == IDS


@pytest.mark.parametrize("command", [["status"], ["incidents"], ["show"]])
def test_an_unknown_job_is_told_with_the_known_ones(
    server: Server, capsys: Said, command: list[str]
) -> None:
    assert main([*command, "--job", "run8"]) == 1
    assert "no job 'run8' has reported; known: run7" in capsys.readouterr().err


def test_incidents_is_a_table_and_can_be_limited(server: Server, capsys: Said) -> None:
    assert main(["incidents", "--limit", "1"]) == 0
    out = capsys.readouterr().out
    assert IDS[0][:10] in out
    assert IDS[1][:10] not in out
    assert main(["incidents", "--kind", "mismatch"]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert "no incident like that" in said.err


def test_show_without_an_id_shows_the_newest(server: Server, capsys: Said) -> None:
    assert main(["show"]) == 0
    out = capsys.readouterr().out
    assert IDS[0] in out
    assert "> load_batch" in out
    assert "train.py:31" in out
    assert "\x1b" not in out


@pytest.mark.parametrize("beginning", [IDS[1], "01JAAB", "01jaab"])
def test_show_takes_an_id_or_its_beginning(server: Server, capsys: Said, beginning: str) -> None:
    assert main(["show", beginning]) == 0
    assert IDS[1] in capsys.readouterr().out


def test_an_ambiguous_beginning_names_those_it_fits(server: Server, capsys: Said) -> None:
    assert main(["show", "01JAA"]) == 2
    err = capsys.readouterr().err
    assert IDS[1] in err
    assert IDS[2] in err
    assert IDS[0] not in err


def test_an_unknown_incident_says_where_they_are_listed(server: Server, capsys: Said) -> None:
    assert main(["show", "zz/../x?y"]) == 1
    assert "`hangwatch incidents` lists them" in capsys.readouterr().err


def test_show_as_json_is_the_document(server: Server, capsys: Said) -> None:
    assert main(["show", IDS[2], "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == server.incidents[2]


def test_dump_waits_and_merges_equal_stacks(server: Server, capsys: Said) -> None:
    stacks = {0: stack(0, "step"), 1: stack(1), 3: stack(3, "step")}
    ranks = [dumped(rank, "done", stacks=[told]) for rank, told in stacks.items()]
    pending = [dumped(r, "pending") for r in (0, 1, 3)]
    server.dumps = [{"id": "d1", "status": "pending", "ranks": pending}] * 2 + [
        {"id": "d1", "status": "done", "ranks": ranks}
    ]
    assert main(["dump", "0-1,3", "--job", "run7"]) == 0
    assert server.bodies == [{"ranks": [0, 1, 3], "native": False, "job": "run7"}]
    out = capsys.readouterr().out
    assert "ranks 0, 3 · MainThread · py-spy" in out
    assert "rank 1 · MainThread · py-spy" in out


def test_a_failed_dump_shows_the_remedy_and_is_an_error(server: Server, capsys: Said) -> None:
    ranks = [
        dumped(0, "done", stacks=[stack(0)]),
        dumped(1, "failed", error="py-spy may not attach: add SYS_PTRACE"),
    ]
    server.dumps = [{"id": "d1", "status": "done", "ranks": ranks}]
    assert main(["dump", "0,1"]) == 1
    assert "! py-spy may not attach: add SYS_PTRACE" in capsys.readouterr().out


def test_a_dump_that_never_comes_is_told_of(server: Server, capsys: Said) -> None:
    server.dumps = [
        {"id": "d1", "status": "pending", "ranks": [dumped(0, "pending"), dumped(2, "pending")]}
    ]
    assert main(["dump", "0,2", "--timeout", "1"]) == 1
    assert "ranks 0, 2 gave no stacks within 1 s" in capsys.readouterr().err


def test_a_rank_that_is_not_there_is_told_by_the_server(server: Server, capsys: Said) -> None:
    assert main(["dump", "9"]) == 1
    assert "job run7 has no rank 9; it has ranks 0-3" in capsys.readouterr().err


def test_the_token_opens_the_door(
    server: Server, capsys: Said, monkeypatch: pytest.MonkeyPatch
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


def test_another_server_is_recognised(server: Server, capsys: Said) -> None:
    assert main(["status", "--url", server.url + "/elsewhere"]) == 1
    assert "not as a hangwatch-server does" in capsys.readouterr().err


def test_what_a_server_says_cannot_drive_the_terminal(server: Server, capsys: Said) -> None:
    server.jobs[0]["job"] = "\x1b]0;title\x07run\x1b[2J9"
    assert main(["status", "--job", "run8"]) == 1
    assert "known: run9" in capsys.readouterr().err


def test_nobody_there_is_exit_3_with_the_remedy(capsys: Said) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: refuses
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert main(["status", "--url", url]) == 3
    err = capsys.readouterr().err
    assert f"cannot reach {url}" in err
    assert "Start `hangwatch-server` there" in err


def test_no_url_is_exit_2(capsys: Said) -> None:
    assert main(["status", "--url", "master:8642"]) == 2
    assert "should look like http://master:8642" in capsys.readouterr().err


def test_watching_ends_with_ctrl_c_and_the_last_state(server: Server) -> None:
    env = os.environ | {"HANGWATCH_URL": server.url}
    command = [sys.executable, "-m", "hangwatch.agent.cli", "status", "--watch"]
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as watching:
        deadline = time.monotonic() + 20
        while (
            len(server.asked) < 7 and time.monotonic() < deadline
        ):  # three a look: with the seventh, two have been shown
            time.sleep(0.05)
        watching.send_signal(signal.SIGINT)
        out, err = watching.communicate(timeout=10)
    assert watching.returncode == 4, err
    assert out.count("run7  stalled") >= 2
    assert err == ""


def test_a_closed_pipe_is_no_traceback(server: Server) -> None:
    server.incidents = [incident(f"01J{n:023}", summary="word " * 500) for n in range(40)]
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
