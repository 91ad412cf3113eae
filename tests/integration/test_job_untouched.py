"""Whatever happens to hangwatch, the job it watches runs as it would without."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import job
from tests.harness.processes import clean_environment, clean_up_job, find_agents, kill_processes
from tests.harness.server import Server, running_server
from tests.simulation.waiting import wait_until

PROGRAM = Path(__file__).with_name("untouched_program.py")
LONG_RUN_ENV = {"SECONDS_LONG": "20"}
LIST_MODULES_CODE = (
    "import sys, torch, torch.distributed; print([m for m in sys.modules if m.partition('.')[0] =="
    " 'hangwatch'])"
)
LIST_THREADS_CODE = "import threading, torch; print([t.name for t in threading.enumerate()])"


@pytest.fixture
def dead_url() -> Iterator[str]:
    """The URL of a server that does not exist. The port stays bound, so that no other process can
    listen on it.
    """
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@contextlib.contextmanager
def mount_tmpfs(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "hangwatch-test", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"needs to mount a tmpfs, as root: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def run_python(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment(**env),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


def list_own_messages(stderr: str) -> list[str]:
    """hangwatch's own messages. Two ranks may write at the same time, and then a line holds both."""
    return stderr.split("hangwatch: ")[1:]


def count_entered(server: Server, name: str) -> int:
    """Collectives entered by the rank that is furthest behind, by what the server shows; -1 while
    it does not show both.
    """
    counts = [
        sum(group["entered"] for group in rank["groups"])
        for rank in server.get_items("ranks", job=name)
    ]
    return min(counts) if len(counts) == 2 else -1


def is_progressing(server: Server, name: str) -> bool:
    """The server sees that both ranks make progress."""
    before = count_entered(server, name)
    return before >= 0 and wait_until(lambda: count_entered(server, name) > max(before, 0), 20.0)


def test_nothing_is_loaded_without_url() -> None:
    assert run_python(LIST_MODULES_CODE) == "[]"
    assert run_python(LIST_THREADS_CODE) == "['MainThread']"


def test_nothing_is_loaded_when_disabled(dead_url: str) -> None:
    assert run_python(LIST_MODULES_CODE, HANGWATCH_URL=dead_url, HANGWATCH_DISABLE="1") == "[]"


def test_non_rank_process_gets_no_ring_or_thread(dead_url: str, tmp_path: Path) -> None:
    assert (
        run_python(LIST_THREADS_CODE, HANGWATCH_URL=dead_url, HANGWATCH_RUN_DIR=str(tmp_path))
        == "['MainThread']"
    )
    assert not list(tmp_path.rglob("*.ring"))


def test_job_without_url(tmp_path: Path) -> None:
    ended = job.run_job(PROGRAM, 2, tmp_path, None)
    assert ended.process.returncode == 0, ended.stderr
    assert ended.stderr.count("hangwatch modules: 0") == 2
    assert not list(ended.run_dir.iterdir())


def test_unreachable_server(dead_url: str, tmp_path: Path) -> None:
    ended = job.run_job(
        PROGRAM, 2, tmp_path, dead_url, env={"SECONDS_LONG": "8"}, agent_exit_timeout_s=0
    )
    assert ended.process.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["trained True"] * 2
    (line,) = list_own_messages(ended.stderr)
    assert dead_url in line


@pytest.mark.parametrize("umask", [0o000, 0o007])
def test_job_is_watched_whatever_its_umask(umask: int, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    (folder / "run").mkdir(parents=True)
    with running_server(tmp_path / "server") as server:
        former = os.umask(umask)
        try:
            ended = job.run_job(PROGRAM, 2, folder, server.url, env={"SECONDS_LONG": "4"})
        finally:
            os.umask(former)
        assert ended.process.returncode == 0, ended.stderr
        assert not list_own_messages(ended.stderr)
        assert count_entered(server, "job") > 0


def test_agent_killed(tmp_path: Path) -> None:
    with (
        running_server(tmp_path / "server") as server,
        job.running_job(PROGRAM, 2, tmp_path / "job", server.url, env=LONG_RUN_ENV) as running,
    ):
        assert wait_until(lambda: count_entered(server, "job") > 0, 60.0)
        assert is_progressing(server, "job")
        (first,) = find_agents(running.run_dir)
        kill_processes({first})
        assert wait_until(lambda: bool(find_agents(running.run_dir) - {first}), 20.0), (
            "no other took its place"
        )
        assert is_progressing(server, "job")
        assert running.process.wait(90.0) == 0, running.stderr
        assert running.stdout.splitlines() == ["trained True"] * 2
        assert not list_own_messages(running.stderr)
        assert not server.get_items("incidents", job="job")


def test_server_restarted(tmp_path: Path) -> None:
    with (
        running_server(tmp_path / "server") as server,
        job.running_job(PROGRAM, 2, tmp_path / "job", server.url, env=LONG_RUN_ENV) as running,
    ):
        assert wait_until(lambda: count_entered(server, "job") > 0, 60.0)
        server.stop()
        server.start()
        assert wait_until(lambda: count_entered(server, "job") > 0, 20.0), (
            "the server did not learn of the job again"
        )
        assert is_progressing(server, "job")
        assert running.process.wait(90.0) == 0, running.stderr
        assert running.stdout.splitlines() == ["trained True"] * 2
        assert not server.get_items("incidents", job="job")


@pytest.mark.parametrize("options", ["size=64k", "size=64k,ro"])
def test_ring_cannot_be_written(options: str, dead_url: str, tmp_path: Path) -> None:
    with mount_tmpfs(tmp_path / "shm", options) as folder:
        ended = job.run_job(
            PROGRAM,
            2,
            tmp_path / "job",
            dead_url,
            env={"HANGWATCH_RUN_DIR": str(folder), "SECONDS_LONG": "3"},
            agent_exit_timeout_s=0,
        )
        assert ended.process.returncode == 0, ended.stderr
        assert ended.stdout.splitlines() == ["trained True"] * 2
        assert len(list_own_messages(ended.stderr)) == 2, ended.stderr  # one a rank
        assert all("recording is off" in line for line in list_own_messages(ended.stderr))
        clean_up_job(folder, 0)


def test_disk_fills_up_under_the_rings(tmp_path: Path) -> None:
    """The ranks' rings are there by then. A node agent that comes later has no room for anything of
    its own.
    """
    with (
        mount_tmpfs(tmp_path / "shm", "size=64m") as folder,
        running_server(tmp_path / "server") as server,
    ):
        variables = {"SECONDS_LONG": "12", "HANGWATCH_RUN_DIR": str(folder)}
        with job.running_job(PROGRAM, 2, tmp_path / "job", server.url, env=variables) as running:
            assert wait_until(lambda: count_entered(server, "job") > 0, 60.0)
            with (
                contextlib.suppress(OSError),
                (folder / "filler").open("wb", buffering=0) as filler,
            ):
                while True:
                    filler.write(bytes(4096))
            assert is_progressing(server, "job")
            (first,) = find_agents(folder)
            kill_processes({first})
            assert wait_until(lambda: bool(find_agents(folder) - {first}), 20.0), (
                "no other took its place"
            )
            assert is_progressing(server, "job")
            assert running.process.wait(90.0) == 0, running.stderr
            assert running.stdout.splitlines() == ["trained True"] * 2
            assert not list_own_messages(running.stderr)
        assert wait_until(lambda: [path.name for path in folder.iterdir()] == ["filler"], 20.0), (
            "something of it is left"
        )
        assert not server.get_items("incidents", job="job")


@pytest.mark.parametrize(
    ("ending", "status"),
    [("status", 3), ("exception", 1), ("signal", -15), ("at once", 5), ("well", 0)],
)
def test_exit_status_and_output(ending: str, status: int, dead_url: str, tmp_path: Path) -> None:
    """A process without a launcher has the same exit status and output bare and watched."""
    rank = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "ENDING": ending,
        "SECONDS_LONG": "0.2",
    }
    said = []
    for url in ("", dead_url):
        run_dir = tmp_path / (url and "run")
        env = clean_environment(
            HANGWATCH_URL=url,
            HANGWATCH_RUN_DIR=str(run_dir),
            MASTER_PORT=str(find_free_port()),
            **rank,
        )
        done = subprocess.run(
            [sys.executable, str(PROGRAM)],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        said.append(
            (done.returncode, done.stdout, re.sub(r"hangwatch modules: \d+\n", "", done.stderr))
        )
    clean_up_job(tmp_path / "run", 0)
    assert said[0] == said[1]
    assert said[1][:2] == (status, "trained True\n")


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_launcher_status(dead_url: str, tmp_path: Path) -> None:
    ended = job.run_job(
        PROGRAM, 2, tmp_path, dead_url, env={"ENDING": "status"}, agent_exit_timeout_s=0
    )
    assert ended.process.returncode == 1
    assert re.search(r"exitcode\s*: 3\b", ended.stderr)


def test_a_pipe_ends_with_the_job(dead_url: str, tmp_path: Path) -> None:
    """The node agent, which stays a while because it reaches no server, holds none of the job's
    descriptors.
    """
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    line = (
        f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 {PROGRAM} 2>&1"
        " | cat"
    )
    env = clean_environment(HANGWATCH_URL=dead_url, HANGWATCH_RUN_DIR=str(run_dir))
    try:
        done = subprocess.run(
            ["bash", "-c", line],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
            timeout=60,
            check=True,
        )
    finally:
        stayed = find_agents(run_dir)
        clean_up_job(run_dir, 0)
    assert done.stdout.count("trained True") == 2
    assert stayed, "there was no node agent that could have held the pipe"
    assert os.getpid() not in stayed
