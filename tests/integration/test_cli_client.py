"""The commands against a small HTTP server that serves canned documents."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from hangwatch.agent.cli import main
from tests.simulation.http_receiver import (
    HttpReceiver,
    HttpReply,
    ReceivedRequest,
    make_json_reply,
)
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


class StubServer(HttpReceiver):
    """Serves documents that a test can change, two items on a page."""

    def __init__(self) -> None:
        super().__init__()
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

    def make_reply(self, request: ReceivedRequest) -> HttpReply:
        if request.method == "POST":
            return self._make_dump_reply(request)
        if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
            return make_stub_reply({"title": "Unauthorized"}, 401)
        url = urlsplit(request.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        path = url.path.removeprefix("/api/v1/")
        if path == "jobs":
            return make_page_reply(self.jobs, path, query)
        if path == "incidents":
            status = query.get("status")
            incidents = [i for i in self.incidents if status in (None, i["status"])]
            return make_page_reply(incidents, path, query)
        if path.startswith("incidents/"):
            return self._make_incident_reply(path.partition("/")[2])
        if path.startswith("dumps/"):
            has_next = len(self.dumps) > 1
            return make_stub_reply(self.dumps.pop(0) if has_next else self.dumps[0])
        return HttpReply(status=404, body=b"<html>another server</html>")

    def _make_dump_reply(self, request: ReceivedRequest) -> HttpReply:
        self.bodies.append(request.parse_json())
        if self.dumps:
            return make_stub_reply(self.dumps[0], 202)
        detail = "job run7 has no rank 9; it has ranks 0-3"
        return make_stub_reply({"title": "Not Found", "detail": detail}, 404)

    def _make_incident_reply(self, incident_id: str) -> HttpReply:
        for incident in self.incidents:
            if incident["id"] == incident_id:
                return make_stub_reply(incident)
        return make_stub_reply({"title": "Not Found", "detail": "no such incident"}, 404)


def make_stub_reply(document: dict[str, Any], status: int = 200) -> HttpReply:
    return make_json_reply(document, status, Date="Sat, 21 Nov 2026 09:01:00 GMT")


def make_page_reply(items: list[dict[str, Any]], path: str, query: dict[str, str]) -> HttpReply:
    """Two items, so that a client must follow ``next`` to get all."""
    selected = [item for item in items if query.get("job") in (None, item["job"])]
    start = int(query.get("after", 0))
    end = start + 2
    following = f"http://elsewhere.invalid/api/v1/{path}?after={end}"
    document = {
        "items": selected[start:end],
        "next": following if len(selected) > end else None,
    }
    return make_stub_reply(document)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubServer]:
    with StubServer() as stub:
        monkeypatch.setenv("HANGWATCH_URL", stub.url)
        monkeypatch.delenv("HANGWATCH_TOKEN", raising=False)
        yield stub


CapturedOutput = pytest.CaptureFixture[str]


def test_status_shows_open_incidents_and_exits_with_4(
    server: StubServer, capsys: CapturedOutput
) -> None:
    assert main(["status"]) == 4
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "run7  stalled  4 ranks: 3 waiting, 1 running · seen 0.4 s ago"
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
    ranks = [make_dumped_rank(rank, "done", stacks=[stack]) for rank, stack in stacks.items()]
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
    """SECURITY.md: "everything: it is the operator's password"."""
    server.token = TOKEN
    assert main(["status"]) == 1
    assert "requires a token: give --token, HANGWATCH_TOKEN" in capsys.readouterr().err
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
    assert "an example is http://master:8642" in capsys.readouterr().err


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


def test_show_is_refreshed_and_waits_for_an_incident(server: StubServer) -> None:
    incidents, server.incidents = server.incidents, []
    env = os.environ | {"HANGWATCH_URL": server.url}
    command = [sys.executable, "-m", "hangwatch.agent.cli", "show", "--watch"]
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as watching:
        wait_until(lambda: len(server.requests) >= 2, 20)
        server.incidents = incidents
        shown = len(server.requests)
        wait_until(lambda: len(server.requests) >= shown + 6, 20)
        watching.send_signal(signal.SIGINT)
        out, err = watching.communicate(timeout=10)
    assert watching.returncode == 0, err
    assert "there is no incident" in err
    assert out.count("is missing in") >= 2


def run_on_terminal(*arguments: str, **env: str) -> str:
    """What a command writes to a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "hangwatch.agent.cli", *arguments],
        env=os.environ | {"TERM": "xterm", **env},
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=subprocess.PIPE,
    ) as running:
        os.close(theirs)
        output = bytearray()
        with contextlib.suppress(OSError):  # the other end is closed
            while part := os.read(ours, 65536):
                output += part
        assert running.wait(20) == 0
    os.close(ours)
    return output.decode()


def test_show_goes_through_the_pager_on_a_terminal(server: StubServer) -> None:
    url = {"HANGWATCH_URL": server.url}
    paged = run_on_terminal("show", **url, PAGER="sed s/^/paged:/").splitlines()
    assert len(paged) > 5 and all(line.startswith("paged:") for line in paged)
    assert "\x1b[" in "".join(paged), "with colour"
    for plain in (
        run_on_terminal("show", "--no-pager", **url, PAGER="sed s/^/paged:/"),
        run_on_terminal("show", **url, PAGER="no-such-pager"),
        run_on_terminal("show", **url, PAGER=""),
        run_on_terminal("show", **url, PAGER="cat", NO_COLOR="1"),
    ):
        assert "is missing in" in plain and "paged:" not in plain
