"""A hang under ``--on-hang abort`` ends in a finished training; a job whose owner refuses is left
to hang.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.harness.job import launch_job
from tests.harness.processes import clean_environment, clean_up_job, process_state
from tests.harness.server import Server, running_server
from tests.simulation.http_receiver import WebhookReceiver
from tests.simulation.waiting import wait_for_value, wait_until

from .node_support import TESTS_DIR, AgentTestbed, open_testbed

PROGRAM = Path(__file__).with_name("recovery_program.py")


@pytest.fixture
def hook() -> Iterator[WebhookReceiver]:
    with WebhookReceiver() as made:
        yield made


@pytest.fixture
def server(tmp_path: Path, hook: WebhookReceiver) -> Iterator[Server]:
    folder = tmp_path / "server"
    folder.mkdir()
    settings = {
        "on_hang": "abort",
        "abort_after": 1,
        "alert": hook.url,
        "abort_kinds": "mismatch, exited_rank missing_rank,deadlock",
    }
    (folder / "hangwatch.toml").write_text(
        "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
    )
    with running_server(folder, stall_after_s=1.5) as running:
        yield running


def test_hang_recovers_to_finished_training(
    tmp_path: Path, server: Server, hook: WebhookReceiver
) -> None:
    folders = [tmp_path / name for name in ("trains", "refuses")]
    trains = launch_job(
        PROGRAM,
        3,
        folders[0],
        server.url,
        name="trains",
        max_restarts=1,
        env={"HANGWATCH_ON_HANG": "abort"},
    )
    refuses = launch_job(
        PROGRAM,
        2,
        folders[1],
        server.url,
        name="refuses",
        max_restarts=1,
        env={"HANGWATCH_ON_HANG": "report"},
    )
    try:
        assert wait_until(lambda: trains.process.poll() is not None, 90.0), server.read_log()
        assert (trains.process.returncode, trains.stdout) == (
            0,
            "trained to step 19 with 192\n",
        ), trains.stderr
        assert "(exitcode: -9)" in trains.stderr, "as torchrun saw it"
        _check_reports(server, hook)
        assert wait_until(
            lambda: any(i["recovery"] for i in server.get_items("incidents", job="refuses")), 10.0
        ), server.read_log()
        [left] = server.get_items("incidents", job="refuses")
        assert (left["status"], left["recovery"]["state"], left["recovery"]["aborts"]) == (
            "open",
            "withheld",
            [],
        )
        assert "HANGWATCH_ON_HANG=report" in left["recovery"]["why"]
        assert {
            process_state(rank["pid"]) for rank in server.get_items("ranks", job="refuses")
        } <= {"S", "R"}
    finally:
        left_behind = [line for job in (trains, refuses) for line in clean_up_job(job.run_dir)]
        for job in (trains, refuses):
            job.process.wait()
    assert left_behind == []


def _check_reports(server: Server, hook: WebhookReceiver) -> None:
    """One incident, of the first attempt; who was ended, when, by which signal, with what result,
    in all views.
    """

    def list_alerts() -> list[dict[str, Any]]:
        # On a busy machine there may be a warning, too, of the second attempt's slow start.
        incidents = server.get_items("incidents", job="trains")
        return [incident for incident in incidents if incident["severity"] == "alert"]

    is_resolved = wait_until(lambda: {i["status"] for i in list_alerts()} == {"resolved"}, 10.0)
    assert is_resolved, [
        (i["kind"], i["attempt"], i["status"], i["summary"]) for i in list_alerts()
    ]
    [incident] = list_alerts()
    assert (
        incident["kind"],
        incident["culprits"],
        incident["attempt"],
        incident["resolution"],
    ) == ("mismatch", [1], 0, "restarted")
    [abort] = incident["recovery"]["aborts"]
    assert (abort["rank"], abort["result"], abort["signal"]) == (1, "ended", signal.SIGKILL)
    assert (
        incident["opened_at"]
        < incident["recovery"]["announced_at"]
        <= abort["ordered_at"]
        <= abort["ended_at"]
        < incident["resolved_at"]
    )
    assert incident["recovery"]["due_at"] <= abort["ordered_at"]
    text = server.get_text(f"incidents/{incident['id']}/text")
    page = httpx.get(
        f"{server.url}/incidents/{incident['id']}", headers={"Accept": "text/html"}
    ).text
    for shown in (text, page):
        assert "Rank 1 was ended by SIGKILL (1 of at most 3" in " ".join(shown.split())
    assert f"rank 1 was ended by SIGKILL (pid {abort['pid']} on {abort['host']})" in page
    sent = [request.parse_json() for request in hook.requests]
    mine = [
        (message["event"], message["text"].partition(":")[0])
        for message in sent
        if message["job"] == "trains"
    ]
    told_of = [
        part for part in mine if part[0] != "planned"
    ]  # where the ranks did not yet wait when the alert went out
    assert [event for event, _ in told_of] == ["opened", "aborting", "aborted", "resolved"]
    assert [title for _, title in told_of][1:3] == ["ABORTING rank 1", "ABORTED rank 1"]
    log = server.read_log()
    assert (
        0
        < log.index("Unless the job moves, rank 1 is to be ended")
        < log.index("ABORTING rank 1")
        < log.index("ABORTED rank 1")
    )


@pytest.fixture
def agent_testbed(tmp_path: Path) -> Iterator[AgentTestbed]:
    with open_testbed(tmp_path) as made:
        yield made


def test_node_agent_ends_only_watched_ranks(agent_testbed: AgentTestbed) -> None:
    """SECURITY.md: "end a process of a job that was not started with `HANGWATCH_ON_HANG=abort`"."""
    stopped = agent_testbed.start_rank(0, "sleep")
    refusing = agent_testbed.start_rank(
        1, "sleep", env=agent_testbed.make_environ(HANGWATCH_ON_HANG="report")
    )
    silent = agent_testbed.start_rank(
        3, "sleep", env=agent_testbed.make_environ(HANGWATCH_ON_HANG="")
    )
    under_shell = agent_testbed.start_process(
        [
            "sh",
            "-c",
            '"$@" & wait $!',
            "sh",
            sys.executable,
            str(TESTS_DIR / "node_target.py"),
            str(agent_testbed.folder),
            "2",
            "sleep",
        ]
    )
    stranger = subprocess.Popen(["sleep", "60"], env=clean_environment())
    agent_testbed.processes.append(stranger)
    agent_testbed.start_agent()
    stopped.send_signal(signal.SIGSTOP)
    keys = [agent_testbed.wait_until_reported(rank)["key"] for rank in (0, 1, 2, 3)]
    ticks = Path(f"/proc/{stranger.pid}/stat").read_text().rpartition(")")[2].split()[19]
    again = keys[1].partition("-")[0] + "-1"  # that pid, of a process of another time

    assert abort_rank(agent_testbed, keys[0]) == {
        "key": keys[0],
        "signal": 9,
        "ended": {"signal": 9},
    }
    assert stopped.wait(10) == -9
    assert "HANGWATCH_ON_HANG=report" in abort_rank(agent_testbed, keys[1])["error"]
    assert "HANGWATCH_ON_HANG=abort" in abort_rank(agent_testbed, keys[3])["error"]
    for key in (again, f"{stranger.pid}-{ticks}"):
        assert "watches no such process" in abort_rank(agent_testbed, key)["error"]
    assert (refusing.poll(), silent.poll(), stranger.poll()) == (None, None, None)
    assert abort_rank(agent_testbed, keys[2])["signal"] == 9
    assert under_shell.wait(10) == 128 + 9, "what Kubernetes and Slurm call retryable"
    assert abort_rank(agent_testbed, keys[0]) == {
        "key": keys[0],
        "ended": {"signal": 9},
    }, "it had ended before"


def abort_rank(agent_testbed: AgentTestbed, key: str) -> dict[str, Any]:
    """Sends an abort command and waits for the reply, which is sent once."""

    def list_aborts() -> list[dict[str, Any]]:
        return [
            one
            for beat in list(agent_testbed.receiver.heartbeats)
            for one in beat.get("aborts", ())
        ]

    before = len(list_aborts())
    agent_testbed.receiver.send_command(key, kind="abort")
    reply: dict[str, Any] = dict(
        wait_for_value(lambda: list_aborts()[before:], f"the answer for {key}")[0]
    )
    reply.pop("request")
    return reply
