"""The node agent on real processes: what it reports, when, and that it leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .node_support import HERE, World, until, world


@pytest.fixture
def w(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path) as made:
        yield made


def main_frames(sample: dict[str, Any]) -> list[str]:
    return [
        frame["function"] for frame in next(t for t in sample["threads"] if t.get("main"))["frames"]
    ]


def test_reports_a_rank_with_its_calls(w: World) -> None:
    w.target(0, "call", "sleep")
    w.agent()
    first = w.heard(0)
    assert first["identity"] | {"started_s": 0} == {
        "job": "node-test", "rank": 0, "world_size": 2, "local_rank": 0, "pid": w.processes[0].pid, "python": "3", "torch": "2",
        "program": "node_target.py", "start_ticks": first["identity"]["start_ticks"], "started_s": 0,
    }  # fmt: skip
    assert first["lifecycle"] == 3

    def standing() -> dict[str, Any] | None:
        told = [s for u in w.receiver.updates(0) for s in u.get("sequences", ()) if s.get("calls")]
        return told[0] if told else None

    sequence = until(standing, "the unfinished call, with its arguments")
    assert (sequence["entered"], sequence["completed"], sequence["op"]) == (6, 5, "all_reduce")
    assert sequence["calls"][0]["site"] == {"file": "/job/train.py", "line": 41, "function": "step"}
    beats = list(w.receiver.beats)
    assert beats[0]["full"]
    assert sum(1 for b in beats for u in b.get("processes", ()) if "identity" in u) == 1, (
        "an identity is told once"
    )
    checkpoints = [
        c
        for u in w.receiver.updates(0)
        for s in u.get("sequences", ())
        for c in s.get("checkpoints", ())
    ]
    assert [seq for seq, _ in checkpoints] == [1, 2, 3, 4, 5, 6]
    assert set(w.receiver.tokens) == {"Bearer secret"}


def test_tells_everything_again_after_a_resync(w: World) -> None:
    w.target(0, "sleep")
    w.agent()
    w.heard(0)
    before = len(w.receiver.beats)
    w.receiver.resync = True
    full = until(
        lambda: [b for b in w.receiver.beats[before + 1 :] if b.get("full")], "a full heartbeat"
    )[0]
    (update,) = full["processes"]
    assert update["identity"]["rank"] == 0
    assert update["sequences"][0]["identity"]["desc"] == "default_pg"
    assert [seq for seq, _ in update["sequences"][0]["checkpoints"]] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("commands", "expected"),
    [
        (("wait", "exit", "3"), {"exit_status": 3}),
        (("wait", "os_exit", "0"), {"exit_status": 0}),
        (("wait", "kill", str(int(signal.SIGKILL))), {"signal": 9}),
    ],
)
def test_knows_how_a_process_ended_that_is_reaped_at_once(
    w: World, commands: tuple[str, ...], expected: dict[str, int]
) -> None:
    target = w.target(1, *commands)
    w.agent()
    w.heard(1)
    assert target.stdin is not None
    target.stdin.write(b"\n")
    target.stdin.flush()
    target.wait()  # the parent reaps it the moment it ends
    reaped = time.monotonic()
    update = until(lambda: w.receiver.ended(1), "the end of rank 1")
    assert update["ended"] == expected
    assert update["ended_s"] < 5
    assert time.monotonic() - reaped < 5
    assert [call["seq"] for call in update["sequences"][0]["calls"]] == [1, 2, 3, 4, 5]


def test_tells_the_exception_that_ended_a_rank(w: World) -> None:
    target = w.target(0, "wait", "raise")
    w.agent()
    w.heard(0)
    target.communicate(b"\n", timeout=10)
    update = until(lambda: w.receiver.ended(0), "the end of rank 0")
    assert update["ended"] == {"exit_status": 1}
    assert update["raised"] == {
        "type": "ValueError",
        "message": "planted",
        "site": {"file": "/job/train.py", "line": 9, "function": "f"},
    }


def test_leaves_after_its_ranks_and_takes_its_files_with_it(w: World) -> None:
    target = w.target(0, "sleep")
    agent = w.agent()
    w.heard(0)
    assert w.start(agent.args).wait(10) == 0, "a second agent gives way"
    assert agent.poll() is None
    target.kill()
    target.wait()
    assert agent.wait(15) == 0
    assert not w.folder.exists()
    assert w.receiver.beats[-1]["gone"] == [w.receiver.updates(0)[0]["key"]]


def test_becomes_a_daemon_and_replaces_one_that_was_killed(w: World) -> None:
    target = w.target(0, "sleep")
    code = "import sys; sys.path[:] = [p for p in sys.path if p]; from hangwatch.agent.node.main import main; main()"
    command = [sys.executable, "-c", code, "--run-dir", str(w.folder), "--linger", "0.5"]
    pids = []
    for _ in range(2):
        started = w.start(command)
        assert started.communicate(timeout=10) == (b"", b""), (
            "it holds none of the descriptors that it was given"
        )
        assert started.returncode == 0
        before = len(w.receiver.beats)
        until(lambda seen=before: len(w.receiver.beats) > seen, "a heartbeat")
        pids.append(int((w.folder / "agent.lock").read_text()))
        assert os.getsid(pids[-1]) != os.getsid(0)
        if len(pids) == 1:
            os.kill(pids[0], signal.SIGKILL)
    assert pids[0] != pids[1]
    memory = Path(f"/proc/{pids[1]}/status").read_text().split("VmRSS:")[1].split()[0]
    assert int(memory) < 60_000, f"{memory} kB"
    target.kill()
    target.wait()
    until(lambda: not Path(f"/proc/{pids[1]}").exists(), "the daemon leaves")
    assert not w.folder.exists()


def test_stacks_of_a_running_and_of_a_stopped_rank(w: World) -> None:
    target = w.target(0, "sleep")
    w.agent()
    key = w.heard(0)["key"]
    sample = w.receiver.stacks(key)
    assert sample["source"] == "py-spy"
    assert main_frames(sample)[0] == "where_it_sleeps"
    assert sample["threads"][0]["frames"][0]["text"] == "time.sleep(120)"
    target.send_signal(signal.SIGSTOP)
    until(lambda: w.receiver.updates(0)[-1]["state"] == "T", "the stopped rank is reported")
    sample = w.receiver.stacks(key)
    assert main_frames(sample)[0] == "where_it_sleeps"
    assert Path(f"/proc/{target.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", (
        "it stays stopped"
    )
    target.send_signal(signal.SIGCONT)
    until(lambda: w.receiver.updates(0)[-1]["state"] in "SR", "it runs again")
    gone = w.receiver.stacks("1-1")
    assert "no such process" in gone["error"]


def test_faulthandler_serves_where_ptrace_is_refused(w: World) -> None:
    w.under = [sys.executable, str(HERE / "node_refused.py")]
    target = w.target(0, "sleep")
    w.agent()
    key = w.heard(0)["key"]
    refused = until(
        lambda: [u for u in w.receiver.updates(0) if u.get("faults")],
        "the refusal, before stacks are asked for",
    )[0]
    assert "SYS_PTRACE" in refused["faults"][0]
    for _ in range(2):
        sample = w.receiver.stacks(key)
        assert sample["source"] == "faulthandler"
        assert main_frames(sample)[0] == "where_it_sleeps"
        assert "--cap-add SYS_PTRACE" in sample["error"]
    assert target.poll() is None


def test_answers_for_calls_also_after_the_end(w: World) -> None:
    target = w.target(0, "sleep")
    w.target(1, "sleep")
    w.agent()
    key = w.heard(0)["key"]
    target.kill()
    target.wait()
    until(lambda: w.receiver.ended(0), "the end")
    w.receiver.ask(key, ask="calls", uid=1, from_seq=3)
    reply = until(lambda: [c for b in w.receiver.beats for c in b.get("calls", ())], "the calls")[0]
    assert (reply["uid"], [call["seq"] for call in reply["calls"]]) == (1, [3, 4, 5])


def test_a_broken_ring_is_a_fault_and_no_crash(w: World) -> None:
    env = w.environ(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", HANGWATCH_JOB="node-test")
    broken = w.start([sys.executable, "-c", "import time; time.sleep(60)"], env=env)
    ticks = Path(f"/proc/{broken.pid}/stat").read_text().rpartition(")")[2].split()[19]
    (w.folder / f"{broken.pid}-{ticks}.ring").write_bytes(b"HANGWTCH" + b"\0" * 100)
    (w.folder / "stray.ring").write_bytes(b"")
    (w.folder / "4194000-1.ring").write_bytes(b"")  # of nobody that lives
    w.target(0, "sleep")
    agent = w.agent()
    w.heard(0)
    update = until(lambda: [u for u in w.receiver.updates(1) if u.get("faults")], "the fault")[0]
    assert "truncated" in update["faults"][0]
    assert agent.poll() is None
    assert not (w.folder / "4194000-1.ring").exists()


def test_a_ring_that_is_cut_while_it_is_mapped_does_not_kill_the_agent(w: World) -> None:
    w.target(0, "sleep")
    w.target(1, "sleep")
    agent = w.agent()
    key = w.heard(0)["key"]
    w.heard(1)
    os.truncate(w.folder / f"{key}.ring", 100)
    until(lambda: w.receiver.updates(0)[-1].get("faults"), "the fault")
    before = len(w.receiver.updates(1))
    until(lambda: len(w.receiver.updates(1)) > before, "the other rank is still reported")
    assert agent.poll() is None


def test_finds_a_rank_that_never_imports_torch(w: World, tmp_path: Path) -> None:
    """A launcher with two ranks: one with a ring, under a wrapper; one without."""
    launcher = tmp_path / "launcher.sh"
    inner = f"{sys.executable} {HERE}/node_target.py {w.folder} 0 sleep"
    launcher.write_text(
        f"RANK=0 bash -c '{inner}; true' &\nRANK=1 sleep 100 &\nRANK=1 python3 -c 1 >/dev/null &\nwait\n"
    )
    env = w.environ(WORLD_SIZE="2", HANGWATCH_JOB="node-test")
    started = subprocess.Popen(
        ["bash", str(launcher)], env=env, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert started.stdout is not None
        started.stdout.readline()
        w.agent()
        plain = w.heard(1)
        assert plain["identity"]["program"] == "sleep 100"
        assert plain.get("lifecycle", 0) == 0
        assert "pulse_s" not in plain
        assert {u["identity"]["pid"] for u in w.receiver.updates(0)} == {
            w.receiver.updates(0)[0]["identity"]["pid"]
        }
        assert "node_target.py" in w.receiver.updates(0)[0]["identity"]["program"]
        os.kill(plain["identity"]["pid"], signal.SIGKILL)
        update = until(lambda: w.receiver.ended(1), "its end")
        assert update["ended"] == {"signal": 9}
    finally:
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()
        started.stdout.close()


def test_outlives_a_server_that_goes_and_comes_back(w: World) -> None:
    w.target(0, "sleep")
    agent = w.agent()
    w.heard(0)
    w.receiver.status = 503
    before, asked = len(w.receiver.beats), len(w.receiver.tokens)
    until(lambda: len(w.receiver.tokens) > asked + 1, "it tries again")
    w.receiver.status = 200
    until(lambda: len(w.receiver.beats) > before, "it is back")
    agent.terminate()
    assert agent.wait(10) == 0
    assert agent.stderr is not None
    log = agent.stderr.read().decode()
    assert log.count("answers 503") == 1
    assert log.count("answers again") == 1


def test_obeys_a_server_that_asks_for_a_pause(w: World) -> None:
    w.target(0, "sleep")
    w.agent()
    w.heard(0)
    w.receiver.status, w.receiver.retry_after = 429, 2
    asked = len(w.receiver.tokens)
    until(lambda: len(w.receiver.tokens) > asked, "it is told")
    told, before = time.monotonic(), len(w.receiver.tokens)
    w.receiver.status = 200
    until(lambda: len(w.receiver.tokens) > before, "it is back")
    assert time.monotonic() - told > 1.5
    costs = [beat["cost"] for beat in w.receiver.beats if "cost" in beat]
    assert costs[0]["cpu_s"] > 0
    assert 5e6 < costs[0]["memory"] < 1e8


def test_reports_as_often_as_the_server_says(w: World) -> None:
    w.target(0, "sleep")
    w.agent()
    w.heard(0)
    w.receiver.interval_s = 1.0
    before = len(w.receiver.beats)
    until(lambda: len(w.receiver.beats) > before, "it is told")
    told, before = time.monotonic(), len(w.receiver.beats)
    until(lambda: len(w.receiver.beats) >= before + 2, "two more")
    assert time.monotonic() - told > 1.8


def test_tells_news_before_its_next_heartbeat_is_due_where_the_server_wants_that(w: World) -> None:
    w.target(0, "sleep")
    other = w.target(1, "sleep")
    w.agent()
    w.heard(0)
    w.heard(1)
    w.receiver.interval_s, w.receiver.news_s = 30.0, 0.5
    before = len(w.receiver.beats)
    until(lambda: len(w.receiver.beats) > before, "it is told")
    stopped = time.monotonic()
    other.send_signal(signal.SIGSTOP)
    assert not any(w.receiver.urgent)
    until(lambda: w.receiver.updates(1)[-1]["state"] == "T", "the news")
    assert time.monotonic() - stopped < 5.0
    assert w.receiver.urgent[-1], "it does not wait for others' heartbeats"
    told = len(w.receiver.beats)
    time.sleep(1.5)
    assert len(w.receiver.beats) == told, "that is all there is"


def test_does_not_tell_where_ranks_are_that_get_on_where_the_server_need_not_know(w: World) -> None:
    w.receiver.details_s = 60.0
    target = w.target(0, "wait", "calls", "calls", "call", "sleep")
    w.agent()
    w.heard(0)
    assert target.stdin is not None
    target.stdin.write(b"\n")
    target.stdin.flush()
    until(lambda: w.receiver.beats[-1].get("brief"), "no more than that it gets on")
    known = w.receiver.updates(0)[-1]["sequences"][0]["entered"]
    told = until(
        lambda: [
            s for u in w.receiver.updates(0) for s in u.get("sequences", ()) if s.get("calls")
        ],
        "where it stands",
    )[0]
    assert (told["entered"], told["completed"]) == (46, 45) and known < 40
    assert sum(bool(beat.get("brief")) for beat in w.receiver.beats) > 10
    assert all(not beat.get("processes") for beat in w.receiver.beats if beat.get("brief"))
    assert not w.receiver.beats[-1].get("brief")


def test_what_a_server_asked_for_and_does_not_take_is_shed(w: World) -> None:
    w.target(0, "sleep")
    agent = w.agent()
    key = w.heard(0)["key"]

    def memory_after_a_thousand() -> float:
        before = len(w.receiver.beats)
        for _ in range(1000):
            w.receiver.ask(key, ask="calls", uid=1, from_seq=1)
        asked = [command["id"] for command in w.receiver.commands]
        until(lambda: not w.receiver.commands, "they are handed out")
        w.receiver.status, tried = 503, len(w.receiver.tokens)
        until(lambda: len(w.receiver.tokens) > tried + 1, "it tries again")
        used = (
            int(Path(f"/proc/{agent.pid}/statm").read_text().split()[1])
            * os.sysconf("SC_PAGE_SIZE")
            / 1e6
        )
        w.receiver.status = 200
        beat = until(
            lambda: [b for b in w.receiver.beats[before:] if "calls" in b],
            "the answers that it kept",
        )[0]
        assert [call["request"] for call in beat["calls"]] == asked[-256:]
        return used

    used = [memory_after_a_thousand() for _ in range(3)]
    assert used[2] < used[0] + 4  # 2000 further answers of this size would be more
    assert until(
        lambda: [b for b in w.receiver.beats if b.get("cost", {}).get("dropped") == 3 * 744],
        "what it dropped",
    )


def test_a_refused_token_is_told_to_the_user(w: World) -> None:
    w.target(0, "sleep")
    w.receiver.status = 401
    w.agent()
    until(lambda: (w.folder / "notice").exists(), "a line for the user")
    assert "refuses the token" in (w.folder / "notice").read_text()
    w.receiver.status = 200
    w.heard(0)
    until(lambda: not (w.folder / "notice").exists(), "it is taken back once the server answers")


def test_a_server_that_does_not_understand_its_heartbeats(w: World) -> None:
    w.target(0, "sleep")
    w.receiver.status = 422
    agent = w.agent()
    until(lambda: len(w.receiver.tokens) > 2, "it goes on")
    w.receiver.status = 200
    until(lambda: w.receiver.beats, "it is back")
    agent.terminate()
    assert agent.wait(10) == 0
    assert agent.stderr is not None
    assert agent.stderr.read().decode().count("install the same hangwatch on both sides") == 1
