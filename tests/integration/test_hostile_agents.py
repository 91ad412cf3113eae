"""Agents that lie, texts that command a terminal, and files that others can write: with a real server,
a real node agent and the real command line.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from hangwatch.agent.environment.run_dir import (
    AGENT_LOCK_NAME,
    AGENT_LOG_NAME,
    RunDirError,
    ensure_run_dir,
)
from hangwatch.agent.recorder.native import cache
from hangwatch.model.ranks import ExitInfo
from hangwatch.protocol import heartbeat
from tests.harness.other_user import OTHER_UID
from tests.harness.processes import clean_environment
from tests.harness.server import Server, run_server
from tests.simulation.http_receiver import WebhookReceiver
from tests.simulation.job_reporter import JobReporter, post_heartbeat
from tests.simulation.simulated_job import SimulatedJob, make_hung_job
from tests.simulation.waiting import wait_until

from .node_support import open_testbed

ESCAPE = "\x1b]0;title\x07\x1b[2J\u202e"


@contextlib.contextmanager
def open_client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, trust_env=False, timeout=20) as client:
        yield client


def make_claim(
    job: SimulatedJob, rank: int, number: int, *, restart: int = 0, ended: ExitInfo | None = None
) -> heartbeat.Heartbeat:
    """What another node agent claims of one rank of the job."""
    claimed = replace(job, restart=restart, late_ranks=set())
    update = replace(claimed.make_process_update(rank, full=True), ended=ended)
    return heartbeat.Heartbeat(
        host=job.host, agent="forger", number=number, full=True, processes=(update,)
    )


@pytest.mark.parametrize(
    ("restart", "ended"), [(7, None), (0, ExitInfo(signal=9))], ids=["restart", "exit"]
)
def test_claims_of_another_agent_change_no_verdict(
    tmp_path: Path, restart: int, ended: ExitInfo | None
) -> None:
    """SECURITY.md: "report the processes that it watches", "change what another, active node agent
    reports", "A new launch under the same job name does not hide an older one".
    """
    job = make_hung_job(hung_for_s=0.0)
    with run_server(tmp_path, "--stall-after", "2") as server, open_client(server) as client:
        reporter = JobReporter(client, job)
        reporter.send_heartbeat()
        for number in range(1, 21):
            post_heartbeat(client, make_claim(job, 1, number, restart=restart, ended=ended))
            reporter.send_heartbeat()
            time.sleep(0.2)
        found = [
            (i["kind"], i["culprits"], i["attempt"])
            for i in reporter.list_incidents()
            if i["status"] == "open"
        ]
        assert found == [("missing_rank", [2], 0)]


def test_names_do_not_command_a_terminal(tmp_path: Path) -> None:
    """SECURITY.md: "cleaned before they reach a terminal, a log, an alert"."""
    job = make_hung_job()
    job.op = f"all_reduce{ESCAPE}"
    job.late_frame = replace(job.late_frame, function=f"load{ESCAPE}", text=f"text{ESCAPE}")
    with WebhookReceiver() as hook:
        flags = ["--stall-after", "2", "--alert", hook.url]
        with run_server(tmp_path, *flags) as server, open_client(server) as client:
            reporter = JobReporter(client, job)
            reporter.send_until(lambda: hook.requests, "the alert")
            shown = server.read_log() + (server.folder / "stdout").read_text()
            assert "all_reduce" in shown, "the alert is logged"
            payload = repr(hook.requests)
    for text in (shown, payload):
        assert not any(c in text for c in ("\x1b", "\u202e", "\\x1b", "u001b", "u202e", "\x07"))


def test_token_is_not_shown(tmp_path: Path) -> None:
    for url in ("ftp://:my-secret-token@master:8642", "http://:my-secret-token@mas ter:8642"):
        done = subprocess.run(
            [Path(sys.executable).with_name("hangwatch"), "doctor"],
            env={**clean_environment(), "HANGWATCH_URL": url},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode != 0
        assert "HANGWATCH_URL" in done.stdout
        assert "my-secret-token" not in done.stdout + done.stderr


def test_files_of_the_server_are_private(tmp_path: Path) -> None:
    """SECURITY.md: "The server's own files are readable by its user only."."""
    folder = tmp_path / "data"
    folder.mkdir(mode=0o755)
    with run_server(tmp_path):
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert files
        assert [p.name for p in files if stat.S_IMODE(p.stat().st_mode) & 0o077] == []


STARTS_HELPERS = """
import sys
sys.path[:] = [path for path in sys.path if path]
from pathlib import Path
from hangwatch.agent.node.hardware.host import Host
from hangwatch.agent.node.hardware.reader import SOURCES, ReaderProcess
from hangwatch.agent.recorder.poller import AgentSupervisor

reader = ReaderProcess()
reader.start_reading([source for source in SOURCES if source.may_block], Host.from_environ(()))
reader.collect(20.0)
AgentSupervisor(Path(sys.argv[1])).ensure_agent()
"""


def test_helper_processes_import_nothing_from_the_working_folder(tmp_path: Path) -> None:
    """SECURITY.md: "Helper processes import no module from the folder in which a job was started.", "They
    run in `/`".
    """
    planted, run_dir, mark = tmp_path / "planted", tmp_path / "run", tmp_path / "mark"
    for folder in (planted, run_dir):
        folder.mkdir(mode=0o700)
    for name in ("hangwatch", *(sys.stdlib_module_names - set(sys.builtin_module_names))):
        (planted / f"{name}.py").write_text(f"open({str(mark)!r}, 'a').write(__name__)\n")
    done = subprocess.run(
        [sys.executable, "-c", STARTS_HELPERS, str(run_dir)],
        env=clean_environment(HANGWATCH_URL="http://127.0.0.1:9"),
        cwd=planted,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    log = run_dir / AGENT_LOG_NAME
    assert wait_until(lambda: log.exists() and "watches" in log.read_text(), 30.0)
    assert not mark.exists(), mark.read_text()
    agent_pid = (run_dir / AGENT_LOCK_NAME).read_text().strip()
    assert os.readlink(f"/proc/{agent_pid}/cwd") == "/"


RECORDS_PRCTL = r"""
#include <stdio.h>
#include <stdlib.h>
int prctl(int option, unsigned long value) {
    if (option == 0x59616d61) {
        FILE *file = fopen(getenv("RECORD"), "w");
        fprintf(file, "%lu", value);
        fclose(file);
    }
    return 0;
}
"""
PERMITS_AGENT = """
import sys
from pathlib import Path
from hangwatch.agent.recorder.poller import AgentSupervisor

AgentSupervisor(Path(sys.argv[1])).ensure_agent()
"""


def test_rank_allows_its_node_agent_to_inspect_it(tmp_path: Path) -> None:
    """SECURITY.md: "A rank allows its node agent to inspect it (`PR_SET_PTRACER`)". Where the kernel has no
    Yama, that call has no effect.
    """
    library, record = tmp_path / "prctl.so", tmp_path / "record"
    command = ["gcc", "-x", "c", "-shared", "-fPIC", "-o", str(library), "-"]
    subprocess.run(command, input=RECORDS_PRCTL, text=True, check=True)
    with open_testbed(tmp_path) as testbed:
        testbed.start_rank(0, "sleep")
        agent = testbed.start_agent()
        testbed.wait_until_reported(0)
        environ = testbed.make_environ(LD_PRELOAD=str(library), RECORD=str(record))
        command = [sys.executable, "-c", PERMITS_AGENT, str(testbed.folder)]
        subprocess.run(command, env=environ, check=True, timeout=60)
        assert record.read_text() == str(agent.pid)


TRAINS = """
import torch, torch.distributed as dist

dist.init_process_group("gloo")
tensor = torch.full((64,), 0.123456789, dtype=torch.float64)
dist.all_reduce(tensor)
dist.broadcast_object_list(["a text of the training"])
print("made", flush=True)
input()
"""


def test_no_tensor_data_is_recorded(tmp_path: Path) -> None:
    """SECURITY.md: "No tensor data is recorded"."""
    environ = clean_environment(
        HANGWATCH_URL="http://127.0.0.1:9", HANGWATCH_RUN_DIR=str(tmp_path),
        RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0",
    )  # fmt: skip
    command = [sys.executable, "-c", TRAINS]
    with subprocess.Popen(
        command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as rank:
        assert rank.stdout is not None and rank.stdout.readline() == b"made\n"
        (ring,) = tmp_path.rglob("*.ring")
        recorded = ring.read_bytes()
        rank.communicate(b"\n")
    assert b"all_reduce" in recorded and b"broadcast" in recorded
    for data in (struct.pack("d", 0.123456789), b"0.12345", b"a text of the training"):
        assert data not in recorded


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a folder to another user")
def test_run_dir_of_another_user_is_refused(tmp_path: Path) -> None:
    with open_testbed(tmp_path) as testbed:
        os.chown(testbed.folder, OTHER_UID, OTHER_UID)
        agent = testbed.start_agent()
        _, errors = agent.communicate(timeout=30)
        assert agent.returncode == 1
        assert f"{testbed.folder} belongs to another user" in errors.decode()


def test_run_dir_that_others_can_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANGWATCH_RUN_DIR", str(tmp_path / "root"))
    (tmp_path / "root").mkdir()
    made = ensure_run_dir("http://127.0.0.1:1")
    for folder in (made, made.parent):
        folder.chmod(0o775)
        with pytest.raises(RunDirError, match=f"{folder} can be written by other users"):
            ensure_run_dir("http://127.0.0.1:1")
        folder.chmod(0o700)
    made.parent.parent.chmod(0o777)
    with pytest.raises(RunDirError, match="can be written by all"):
        ensure_run_dir("http://127.0.0.1:1")


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o007, 0o027, 0o077])
def test_run_dir_does_not_depend_on_the_umask(
    umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANGWATCH_RUN_DIR", str(tmp_path / "missing" / "root"))
    tmp_path.chmod(0o755)
    former = os.umask(umask)
    try:
        made = [ensure_run_dir("http://127.0.0.1:1") for _ in range(2)]
    finally:
        os.umask(former)
    assert made[0] == made[1]
    for folder in (made[0], *made[0].parents[:3]):
        assert folder.stat().st_mode & 0o777 == 0o700, folder


def test_library_below_a_folder_that_all_can_write_is_not_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "open" / "home" / "cache"
    folder.mkdir(parents=True)
    library = folder / "recorder.so"
    shutil.copy("/bin/true", library)
    cache.append_digest(library)
    library.chmod(0o600)
    cache.verify_library(library)
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(PermissionError, match=f"{tmp_path}/open can be written by all users"):
        cache.verify_library(library)
