"""The node agent on real processes: what it reports, when, and that it leaves nothing behind."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from hangwatch.model.bounds import MAX_RANKS
from hangwatch.protocol.heartbeat import HEARTBEAT_PATH, PROTOCOL_VERSION
from hangwatch.protocol.request_signing import Credential, SignedRequest
from hangwatch.ring.layout import LIVE_OFFSET, LiveWord
from tests.harness.job import PTRACE_REFUSED
from tests.harness.processes import read_resident_mb
from tests.harness.server import run_server
from tests.simulation.waiting import wait_for_value

from .node_support import TESTS_DIR, AgentTestbed, open_testbed


@pytest.fixture
def agent_testbed(tmp_path: Path) -> Iterator[AgentTestbed]:
    with open_testbed(tmp_path) as made:
        yield made


def main_frames(sample: dict[str, Any]) -> list[str]:
    return [
        frame["function"] for frame in next(t for t in sample["threads"] if t.get("main"))["frames"]
    ]


def has_more_heartbeats(testbed: AgentTestbed, count: int) -> bool:
    return len(testbed.receiver.heartbeats) > count


def test_reports_a_rank_with_its_calls(agent_testbed: AgentTestbed) -> None:
    agent_testbed.start_rank(0, "call", "sleep")
    agent_testbed.start_agent()
    first = agent_testbed.wait_until_reported(0)
    assert first["identity"] | {"started_s": 0} == {
        "job": "node-test", "rank": 0, "world_size": 2, "local_rank": 0, "pid": agent_testbed.processes[0].pid, "python": "3", "torch": "2",
        "program": "node_target.py", "start_ticks": first["identity"]["start_ticks"], "started_s": 0, "on_hang": "abort",
    }  # fmt: skip
    assert first["lifecycle"] == 3

    def find_blocked_update() -> dict[str, Any] | None:
        updates = [
            s
            for u in agent_testbed.receiver.list_updates(0)
            for s in u.get("streams", ())
            if s.get("calls")
        ]
        return updates[0] if updates else None

    stream = wait_for_value(find_blocked_update, "the unfinished call, with its arguments")
    assert (stream["entered"], stream["completed"], stream["op"]) == (6, 5, "all_reduce")
    assert stream["calls"][0]["site"] == {"file": "/job/train.py", "line": 41, "function": "step"}
    beats = list(agent_testbed.receiver.heartbeats)
    assert beats[0]["full"]
    assert sum(1 for b in beats for u in b.get("processes", ()) if "identity" in u) == 1, (
        "an identity is reported once"
    )
    checkpoints = [
        c
        for u in agent_testbed.receiver.list_updates(0)
        for s in u.get("streams", ())
        for c in s.get("checkpoints", ())
    ]
    assert [seq for seq, _ in checkpoints] == [1, 2, 3, 4, 5, 6]
    credential = Credential.from_token("secret")
    for header in agent_testbed.receiver.tokens:
        signed = SignedRequest.from_header(header or "")
        assert signed is not None, header
        assert credential.verify_request(signed, "POST", HEARTBEAT_PATH), header


def test_resends_everything_after_resync(agent_testbed: AgentTestbed) -> None:
    agent_testbed.start_rank(0, "sleep")
    agent_testbed.start_agent()
    agent_testbed.wait_until_reported(0)
    before = len(agent_testbed.receiver.heartbeats)
    agent_testbed.receiver.resync = True
    full = wait_for_value(
        lambda: [b for b in agent_testbed.receiver.heartbeats[before + 1 :] if b.get("full")],
        "a full heartbeat",
    )[0]
    (update,) = full["processes"]
    assert update["identity"]["rank"] == 0
    assert update["streams"][0]["identity"]["desc"] == "default_pg"
    assert [seq for seq, _ in update["streams"][0]["checkpoints"]] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("commands", "expected"),
    [
        (("wait", "exit", "3"), {"exit_status": 3}),
        (("wait", "os_exit", "0"), {"exit_status": 0}),
        (("wait", "kill", str(int(signal.SIGKILL))), {"signal": 9}),
    ],
)
def test_exit_status_is_known_of_immediately_reaped_process(
    agent_testbed: AgentTestbed, commands: tuple[str, ...], expected: dict[str, int]
) -> None:
    target = agent_testbed.start_rank(1, *commands)
    agent_testbed.start_agent()
    agent_testbed.wait_until_reported(1)
    assert target.stdin is not None
    target.stdin.write(b"\n")
    target.stdin.flush()
    target.wait()  # the parent reaps it the moment it ends
    reaped = time.monotonic()
    update = wait_for_value(lambda: agent_testbed.receiver.find_exit_update(1), "the end of rank 1")
    assert update["ended"] == expected
    assert update["ended_s"] < 5
    assert time.monotonic() - reaped < 5
    assert [call["seq"] for call in update["streams"][0]["calls"]] == [1, 2, 3, 4, 5]


def test_reports_exception_that_ended_a_rank(agent_testbed: AgentTestbed) -> None:
    target = agent_testbed.start_rank(0, "wait", "raise")
    agent_testbed.start_agent()
    agent_testbed.wait_until_reported(0)
    target.communicate(b"\n", timeout=10)
    update = wait_for_value(lambda: agent_testbed.receiver.find_exit_update(0), "the end of rank 0")
    assert update["ended"] == {"exit_status": 1}
    assert update["raised"] == {
        "type": "ValueError",
        "message": "planted",
        "site": {"file": "/job/train.py", "line": 9, "function": "f"},
    }


def test_reports_a_rank_that_ended_before_its_agent_started(agent_testbed: AgentTestbed) -> None:
    """SECURITY.md: "what a rank wrote last is the evidence of its end, also if it dies before its node
    agent has started".
    """
    agent_testbed.start_rank(0, "raise").wait(30)
    agent_testbed.start_agent()
    agent_testbed.wait_until_reported(0)
    updates = agent_testbed.receiver.list_updates(0)
    assert [update["raised"]["message"] for update in updates if "raised" in update] == ["planted"]


def test_exits_after_its_ranks_and_removes_files(agent_testbed: AgentTestbed) -> None:
    target = agent_testbed.start_rank(0, "sleep")
    agent = agent_testbed.start_agent()
    agent_testbed.wait_until_reported(0)
    assert agent_testbed.start_process(cast("list[str]", agent.args)).wait(10) == 0, (
        "a second agent gives way"
    )
    assert agent.poll() is None
    target.kill()
    target.wait()
    assert agent.wait(15) == 0
    assert not agent_testbed.folder.exists()
    assert agent_testbed.receiver.heartbeats[-1]["gone"] == [
        agent_testbed.receiver.list_updates(0)[0]["key"]
    ]


def test_rank_that_starts_while_the_agent_ends_is_reported(agent_testbed: AgentTestbed) -> None:
    target = agent_testbed.start_rank(0, "wait", "exit", "0")
    agent = agent_testbed.start_agent()
    agent_testbed.wait_until_reported(0)
    agent_testbed.receiver.last_reply_delay_s = 1.5
    target.communicate(b"\n")
    wait_for_value(
        lambda: agent_testbed.receiver.heartbeats[-1].get("gone"), "the agent's last heartbeat"
    )
    next_target = agent_testbed.start_rank(1, "wait", "exit", "0")
    agent_testbed.wait_until_reported(1)
    assert agent.poll() is None, "nobody else has started an agent"
    next_target.communicate(b"\n")
    wait_for_value(lambda: agent_testbed.receiver.find_exit_update(1), "the end of rank 1")
    assert agent.wait(15) == 0
    assert not agent_testbed.folder.exists()


def test_daemonizes_and_replaces_killed_agent(agent_testbed: AgentTestbed) -> None:
    target = agent_testbed.start_rank(0, "sleep")
    code = (
        "import sys; sys.path[:] = [p for p in sys.path if p]; from hangwatch.agent.node.main"
        " import main; main()"
    )
    command = [
        sys.executable,
        "-c",
        code,
        "--run-dir",
        str(agent_testbed.folder),
        "--linger",
        "0.5",
    ]
    pids = []
    for _ in range(2):
        started = agent_testbed.start_process(command)
        assert started.communicate(timeout=10) == (
            b"",
            b"",
        ), "it holds none of the descriptors that it was given"
        assert started.returncode == 0
        before = len(agent_testbed.receiver.heartbeats)
        wait_for_value(partial(has_more_heartbeats, agent_testbed, before), "a heartbeat")
        pids.append(int((agent_testbed.folder / "agent.lock").read_text()))
        assert os.getsid(pids[-1]) != os.getsid(0)
        if len(pids) == 1:
            os.kill(pids[0], signal.SIGKILL)
    assert pids[0] != pids[1]
    assert read_resident_mb(pids[1]) < 60
    target.kill()
    target.wait()
    wait_for_value(lambda: not Path(f"/proc/{pids[1]}").exists(), "the daemon leaves")
    assert not agent_testbed.folder.exists()


def test_stacks_of_a_running_and_of_a_stopped_rank(agent_testbed: AgentTestbed) -> None:
    """SECURITY.md: "Stacks show file names, function names and source lines"."""
    target = agent_testbed.start_rank(0, "sleep")
    agent_testbed.start_agent()
    key = agent_testbed.wait_until_reported(0)["key"]
    sample = agent_testbed.receiver.request_stacks(key)
    assert sample["source"] == "py-spy"
    assert main_frames(sample)[0] == "where_it_sleeps"
    assert sample["threads"][0]["frames"][0]["text"] == "time.sleep(120)"
    target.send_signal(signal.SIGSTOP)
    wait_for_value(
        lambda: agent_testbed.receiver.list_updates(0)[-1]["state"] == "T",
        "the stopped rank is reported",
    )
    sample = agent_testbed.receiver.request_stacks(key)
    assert main_frames(sample)[0] == "where_it_sleeps"
    assert Path(f"/proc/{target.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", (
        "it stays stopped"
    )
    target.send_signal(signal.SIGCONT)
    wait_for_value(
        lambda: agent_testbed.receiver.list_updates(0)[-1]["state"] in "SR", "it runs again"
    )
    gone = agent_testbed.receiver.request_stacks("1-1")
    assert "no such process" in gone["error"]


def test_faulthandler_is_used_if_ptrace_is_refused(agent_testbed: AgentTestbed) -> None:
    agent_testbed.command_prefix = list(PTRACE_REFUSED)
    target = agent_testbed.start_rank(0, "sleep")
    agent_testbed.start_agent()
    key = agent_testbed.wait_until_reported(0)["key"]
    refused = wait_for_value(
        lambda: [u for u in agent_testbed.receiver.list_updates(0) if u.get("faults")],
        "the refusal, before stacks are requested",
    )[0]
    assert "SYS_PTRACE" in refused["faults"][0]
    for _ in range(2):
        sample = agent_testbed.receiver.request_stacks(key)
        assert sample["source"] == "faulthandler"
        assert main_frames(sample)[0] == "where_it_sleeps"
        assert "--cap-add SYS_PTRACE" in sample["error"]
    assert target.poll() is None


def test_serves_calls_after_rank_exit(agent_testbed: AgentTestbed) -> None:
    target = agent_testbed.start_rank(0, "sleep")
    agent_testbed.start_rank(1, "sleep")
    agent_testbed.start_agent()
    key = agent_testbed.wait_until_reported(0)["key"]
    target.kill()
    target.wait()
    wait_for_value(lambda: agent_testbed.receiver.find_exit_update(0), "the end")
    agent_testbed.receiver.send_command(key, kind="calls", uid=1, from_seq=3, to_seq=9)
    reply = wait_for_value(
        lambda: [c for b in agent_testbed.receiver.heartbeats for c in b.get("calls", ())],
        "the calls",
    )[0]
    assert (reply["uid"], [call["seq"] for call in reply["calls"]]) == (1, [3, 4, 5])


def test_broken_ring_is_a_fault_not_a_crash(agent_testbed: AgentTestbed) -> None:
    env = agent_testbed.make_environ(
        RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", HANGWATCH_JOB="node-test"
    )
    broken = agent_testbed.start_process(
        [sys.executable, "-c", "import time; time.sleep(60)"], env=env
    )
    ticks = Path(f"/proc/{broken.pid}/stat").read_text().rpartition(")")[2].split()[19]
    (agent_testbed.folder / f"{broken.pid}-{ticks}.ring").write_bytes(b"HANGWTCH" + b"\0" * 100)
    (agent_testbed.folder / "stray.ring").write_bytes(b"")
    (agent_testbed.folder / "4194000-1.ring").write_bytes(b"")  # of a process that does not exist
    agent_testbed.start_rank(0, "sleep")
    agent = agent_testbed.start_agent()
    agent_testbed.wait_until_reported(0)
    update = wait_for_value(
        lambda: [u for u in agent_testbed.receiver.list_updates(1) if u.get("faults")], "the fault"
    )[0]
    assert "truncated" in update["faults"][0]
    assert agent.poll() is None
    assert not (agent_testbed.folder / "4194000-1.ring").exists()


def test_truncated_mapped_ring_does_not_kill_agent(agent_testbed: AgentTestbed) -> None:
    agent_testbed.start_rank(0, "sleep")
    agent_testbed.start_rank(1, "sleep")
    agent = agent_testbed.start_agent()
    key = agent_testbed.wait_until_reported(0)["key"]
    agent_testbed.wait_until_reported(1)
    os.truncate(agent_testbed.folder / f"{key}.ring", 100)
    wait_for_value(lambda: agent_testbed.receiver.list_updates(0)[-1].get("faults"), "the fault")
    before = len(agent_testbed.receiver.list_updates(1))
    wait_for_value(
        lambda: len(agent_testbed.receiver.list_updates(1)) > before,
        "the other rank is still reported",
    )
    assert agent.poll() is None


def test_value_out_of_bounds_hides_no_other_rank(
    agent_testbed: AgentTestbed, tmp_path: Path
) -> None:
    """The rank that has it is reported without its ring, and nothing is concluded from its calls."""
    with run_server(tmp_path / "server") as server:
        environ = agent_testbed.make_environ(HANGWATCH_URL=server.url)
        other = agent_testbed.start_rank(0, "wait", "call", "sleep", env=environ)
        odd = agent_testbed.start_rank(1, "sleep", env=environ)
        agent_testbed.start_agent(env=environ)

        def find_groups() -> list[dict[str, Any]]:
            ranks = server.get_items("ranks", job="node-test")
            return [group for rank in ranks for group in rank["groups"]]

        wait_for_value(lambda: len(find_groups()) == 2, "both ranks are reported")
        (ring,) = agent_testbed.folder.glob(f"{odd.pid}-*.ring")

        with ring.open("r+b") as file:  # The recorder writes this word only with a new stream.
            file.seek(LIVE_OFFSET + 8 * LiveWord.OPENED)
            file.write(struct.pack("<Q", (1 << 63) + 2))
        wait_for_value(lambda: find_groups()[1].get("incomplete"), "its ring is left out")
        assert other.stdin is not None
        other.stdin.write(b"\n")
        other.stdin.flush()
        wait_for_value(lambda: find_groups()[0]["entered"] == 6, "the next call of the other rank")
        metrics = httpx.get(f"{server.url}/metrics", trust_env=False).text
        assert "hangwatch_heartbeats_malformed_total 1.0" in metrics


def test_rank_whose_identity_is_refused_hides_no_other_rank(
    agent_testbed: AgentTestbed, tmp_path: Path
) -> None:
    with run_server(tmp_path / "server") as server:
        environ = agent_testbed.make_environ(HANGWATCH_URL=server.url)
        for rank in (MAX_RANKS, 0):
            agent_testbed.start_rank(rank, "sleep", env=environ)
        agent_testbed.start_agent(env=environ)
        ranks = wait_for_value(lambda: server.get_items("ranks", job="node-test"), "a rank")
        assert [(rank["rank"], rank["state"]) for rank in ranks] == [(0, "running"), (1, "missing")]


def test_rank_that_its_user_ends_by_its_ring_is_reported(agent_testbed: AgentTestbed) -> None:
    """SECURITY.md: "they can read its memory and end it anyway", "One that truncates a rank's ring ends
    the rank (SIGBUS).".
    """
    rank = agent_testbed.start_rank(0, "wait", "calls")
    agent = agent_testbed.start_agent()
    key = agent_testbed.wait_until_reported(0)["key"]
    os.truncate(agent_testbed.folder / f"{key}.ring", 4096)
    assert rank.stdin is not None
    rank.stdin.write(b"\n")
    rank.stdin.flush()
    assert rank.wait(30) == -signal.SIGBUS
    update = wait_for_value(lambda: agent_testbed.receiver.find_exit_update(0), "its end")
    assert update["ended"] == {"signal": signal.SIGBUS}
    assert agent.poll() is None


def test_finds_a_rank_that_never_imports_torch(agent_testbed: AgentTestbed, tmp_path: Path) -> None:
    """A launcher with two ranks: one with a ring, under a wrapper; one without."""
    launcher = tmp_path / "launcher.sh"
    inner = f"{sys.executable} {TESTS_DIR}/node_target.py {agent_testbed.folder} 0 sleep"
    launcher.write_text(
        f"RANK=0 bash -c '{inner}; true' &\nRANK=1 sleep 100 &\nRANK=1 python3 -c 1 >/dev/null"
        " &\nwait\n"
    )
    env = agent_testbed.make_environ(WORLD_SIZE="2", HANGWATCH_JOB="node-test")
    started = subprocess.Popen(
        ["bash", str(launcher)], env=env, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert started.stdout is not None
        started.stdout.readline()
        agent_testbed.start_agent()
        plain = agent_testbed.wait_until_reported(1)
        assert plain["identity"]["program"] == "sleep 100"
        assert plain.get("lifecycle", 0) == 0
        assert "pulse_s" not in plain
        assert {u["identity"]["pid"] for u in agent_testbed.receiver.list_updates(0)} == {
            agent_testbed.receiver.list_updates(0)[0]["identity"]["pid"]
        }
        assert "node_target.py" in agent_testbed.receiver.list_updates(0)[0]["identity"]["program"]
        os.kill(plain["identity"]["pid"], signal.SIGKILL)
        update = wait_for_value(lambda: agent_testbed.receiver.find_exit_update(1), "its end")
        assert update["ended"] == {"signal": 9}
    finally:
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()
        assert started.stdout is not None
        started.stdout.close()


def test_survives_server_restart(agent_testbed: AgentTestbed) -> None:
    agent_testbed.start_rank(0, "sleep")
    agent = agent_testbed.start_agent()
    agent_testbed.wait_until_reported(0)
    agent_testbed.receiver.status = 503
    heartbeat_count, request_count = (
        len(agent_testbed.receiver.heartbeats),
        len(agent_testbed.receiver.tokens),
    )
    wait_for_value(
        lambda: len(agent_testbed.receiver.tokens) > request_count + 1, "another attempt to connect"
    )
    agent_testbed.receiver.status = 200
    wait_for_value(lambda: len(agent_testbed.receiver.heartbeats) > heartbeat_count, "it is back")
    agent.terminate()
    assert agent.wait(10) == 0
    assert agent.stderr is not None
    log = agent.stderr.read().decode()
    assert log.count("answers 503") == 1
    assert log.count("answers again") == 1


def test_honours_retry_after(agent_testbed: AgentTestbed) -> None:
    agent_testbed.start_rank(0, "sleep")
    agent_testbed.start_agent()
    agent_testbed.wait_until_reported(0)
    agent_testbed.receiver.status, agent_testbed.receiver.retry_after = 429, 2
    request_count = len(agent_testbed.receiver.tokens)
    wait_for_value(
        lambda: len(agent_testbed.receiver.tokens) > request_count, "the refused request"
    )
    refused_at, count_after_refusal = time.monotonic(), len(agent_testbed.receiver.tokens)
    agent_testbed.receiver.status = 200
    wait_for_value(lambda: len(agent_testbed.receiver.tokens) > count_after_refusal, "it is back")
    assert time.monotonic() - refused_at > 1.5
    costs = [beat["cost"] for beat in agent_testbed.receiver.heartbeats if "cost" in beat]
    assert costs[0]["cpu_s"] > 0
    assert 5e6 < costs[0]["memory"] < 1e8


def test_report_interval_follows_server(agent_testbed: AgentTestbed) -> None:
    agent_testbed.start_rank(0, "sleep")
    agent_testbed.start_agent()
    agent_testbed.wait_until_reported(0)
    assert agent_testbed.receiver.heartbeats[0].get("version", 1) == PROTOCOL_VERSION
    agent_testbed.receiver.interval_s = 1.0
    heartbeat_count = len(agent_testbed.receiver.heartbeats)
    wait_for_value(
        lambda: len(agent_testbed.receiver.heartbeats) > heartbeat_count,
        "the reply with the new interval",
    )
    replied_at, heartbeat_count = time.monotonic(), len(agent_testbed.receiver.heartbeats)
    wait_for_value(
        lambda: len(agent_testbed.receiver.heartbeats) >= heartbeat_count + 2, "two more"
    )
    assert time.monotonic() - replied_at > 1.8


def test_reports_changes_early_if_requested(agent_testbed: AgentTestbed) -> None:
    agent_testbed.start_rank(0, "sleep")
    other = agent_testbed.start_rank(1, "sleep")
    agent_testbed.start_agent()
    agent_testbed.wait_until_reported(0)
    agent_testbed.wait_until_reported(1)
    agent_testbed.receiver.interval_s, agent_testbed.receiver.changes_within_s = 30.0, 0.5
    before = len(agent_testbed.receiver.heartbeats)
    wait_for_value(
        lambda: len(agent_testbed.receiver.heartbeats) > before, "the reply with the new interval"
    )
    stopped = time.monotonic()
    other.send_signal(signal.SIGSTOP)
    assert not any(agent_testbed.receiver.urgent_flags)
    wait_for_value(lambda: agent_testbed.receiver.list_updates(1)[-1]["state"] == "T", "the change")
    assert time.monotonic() - stopped < 5.0
    assert agent_testbed.receiver.urgent_flags[-1], "it does not wait for others' heartbeats"
    heartbeat_count = len(agent_testbed.receiver.heartbeats)
    time.sleep(1.5)
    assert len(agent_testbed.receiver.heartbeats) == heartbeat_count, "no further heartbeat is sent"


def test_sends_terse_updates_if_allowed(agent_testbed: AgentTestbed) -> None:
    agent_testbed.receiver.details_s = 60.0
    target = agent_testbed.start_rank(0, "wait", "calls", "calls", "call", "sleep")
    agent_testbed.start_agent()
    agent_testbed.wait_until_reported(0)
    assert target.stdin is not None
    target.stdin.write(b"\n")
    target.stdin.flush()
    wait_for_value(lambda: agent_testbed.receiver.heartbeats[-1].get("brief"), "terse updates")
    first_entered = agent_testbed.receiver.list_updates(0)[-1]["streams"][0]["entered"]
    full_update = wait_for_value(
        lambda: [
            s
            for u in agent_testbed.receiver.list_updates(0)
            for s in u.get("streams", ())
            if s.get("calls")
        ],
        "an update with the rank's current call",
    )[0]
    assert (full_update["entered"], full_update["completed"]) == (46, 45) and first_entered < 40
    assert sum(bool(beat.get("brief")) for beat in agent_testbed.receiver.heartbeats) > 10
    assert all(
        not beat.get("processes") for beat in agent_testbed.receiver.heartbeats if beat.get("brief")
    )
    assert not agent_testbed.receiver.heartbeats[-1].get("brief")


def test_undelivered_replies_are_dropped(agent_testbed: AgentTestbed) -> None:
    agent_testbed.start_rank(0, "sleep")
    agent = agent_testbed.start_agent()
    key = agent_testbed.wait_until_reported(0)["key"]

    def memory_after_a_thousand() -> float:
        before = len(agent_testbed.receiver.heartbeats)
        for _ in range(1000):
            agent_testbed.receiver.send_command(key, kind="calls", uid=1, from_seq=1, to_seq=9)
        request_ids = [command["id"] for command in agent_testbed.receiver.commands]
        wait_for_value(lambda: not agent_testbed.receiver.commands, "they are handed out")
        agent_testbed.receiver.status, tried = 503, len(agent_testbed.receiver.tokens)
        wait_for_value(
            lambda: len(agent_testbed.receiver.tokens) > tried + 1, "another attempt to connect"
        )
        used = read_resident_mb(agent.pid)
        agent_testbed.receiver.status = 200
        beat = wait_for_value(
            lambda: [b for b in agent_testbed.receiver.heartbeats[before:] if "calls" in b],
            "the answers that it kept",
        )[0]
        assert [call["request"] for call in beat["calls"]] == request_ids[-256:]
        return used

    used = [memory_after_a_thousand() for _ in range(3)]
    assert used[2] < used[0] + 4  # 2000 further answers of this size would be more
    assert wait_for_value(
        lambda: [
            b
            for b in agent_testbed.receiver.heartbeats
            if b.get("cost", {}).get("dropped") == 3 * 744
        ],
        "what it dropped",
    )


def test_refused_token_is_reported_to_user(agent_testbed: AgentTestbed) -> None:
    agent_testbed.start_rank(0, "sleep")
    agent_testbed.receiver.status = 401
    agent_testbed.start_agent()
    wait_for_value(lambda: (agent_testbed.folder / "notice").exists(), "a line for the user")
    assert "refuses the token" in (agent_testbed.folder / "notice").read_text()
    agent_testbed.receiver.status = 200
    agent_testbed.wait_until_reported(0)
    wait_for_value(
        lambda: not (agent_testbed.folder / "notice").exists(),
        "it is taken back once the server answers",
    )


def test_server_rejecting_heartbeats(agent_testbed: AgentTestbed) -> None:
    agent_testbed.start_rank(0, "sleep")
    agent_testbed.receiver.status = 422
    agent = agent_testbed.start_agent()
    wait_for_value(lambda: len(agent_testbed.receiver.tokens) > 2, "it goes on")
    agent_testbed.receiver.status = 200
    wait_for_value(lambda: agent_testbed.receiver.heartbeats, "it is back")
    agent.terminate()
    assert agent.wait(10) == 0
    assert agent.stderr is not None
    assert agent.stderr.read().decode().count("install the same hangwatch on both sides") == 1
