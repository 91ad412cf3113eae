"""Another user of the machine, with default settings on both sides: no stack is read, no rank is
ended, and no verdict is forged or hidden.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from hangwatch.agent.cli.commands.doctor import check_server
from hangwatch.agent.cli.main import main
from hangwatch.agent.environment.run_dir import ensure_run_dir, find_run_dir
from hangwatch.agent.node.reporting.uplink import HeartbeatPost, Uplink
from hangwatch.agent.transport import client
from hangwatch.agent.transport.client import ServerTarget
from hangwatch.protocol import codec, heartbeat
from hangwatch.protocol.heartbeat import HEARTBEAT_PATH
from hangwatch.protocol.request_signing import Credential, derive_job_token
from tests.harness.other_user import OTHER_UID, run_as_other_user
from tests.harness.processes import clean_environment
from tests.harness.server import COMMAND, Server, run_server
from tests.harness.signing import fetch_server_time, post_signed
from tests.simulation.waiting import wait_for_value

from .node_support import AgentTestbed, open_testbed

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
TOKEN = "more-than-sixteen-characters"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with run_server(tmp_path_factory.mktemp("server")) as running:
        yield running


def request(url: str, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, str]:
    """The status and the text, without the imports that httpx does at its first use."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
    with contextlib.closing(connection):
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.read().decode()


def make_heartbeat(job: str = "victim", agent: str = "forger", pid: int = 1) -> bytes:
    identity = heartbeat.ProcessIdentity(
        job=job, rank=0, world_size=2, pid=pid, start_ticks=1, on_hang="abort"
    )
    update = heartbeat.ProcessUpdate(key=f"{pid}-1", identity=identity)
    beat = heartbeat.Heartbeat(host="here", agent=agent, number=1, processes=(update,))
    return json.dumps(codec.encode_message(beat)).encode()


@pytest.mark.parametrize("path", ["/api/v1/jobs", "/api/v1/ranks", "/ranks", "/metrics", "/docs"])
def test_other_user_reads_nothing(server: Server, path: str) -> None:
    """SECURITY.md: "everything, without a token if the server listens on loopback", "read ranks or
    stacks, report as a node agent, ask for stacks", "A server without a token answers only to
    its own user and to root", "the kernel says who is at the other end of a connection".
    """
    status, text = run_as_other_user(lambda: request(server.url, "GET", path))
    assert (status, "--token" in text) == (403, True)
    assert request(server.url, "GET", path)[0] == 200, "the server's own user"


def test_other_user_forges_nothing(server: Server) -> None:
    """SECURITY.md: "report as a node agent, ask for stacks"."""
    forged = make_heartbeat()
    assert (
        run_as_other_user(lambda: request(server.url, "POST", "/api/v1/heartbeats", forged))[0]
        == 403
    )
    asked = json.dumps({"job": "victim", "ranks": "0"}).encode()
    assert run_as_other_user(lambda: request(server.url, "POST", "/api/v1/dumps", asked))[0] == 403
    assert server.get_items("jobs") == []


def test_everybody_may_check_the_health_and_try_to_log_in(server: Server, tmp_path: Path) -> None:
    """SECURITY.md: "read `/healthz` and `/readyz`, and try to log in"."""

    def check_health(url: str) -> list[int]:
        return [request(url, "GET", path)[0] for path in ("/healthz", "/readyz")]

    def log_in(url: str, token: str) -> int:
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        return request(url, "POST", "/login", f"token={token}".encode(), **form)[0]

    assert run_as_other_user(lambda: check_health(server.url)) == [200, 200]
    with run_server(tmp_path, "--token", TOKEN) as running:
        url = running.loopback_url
        assert run_as_other_user(lambda: check_health(url)) == [200, 200]
        assert run_as_other_user(lambda: [log_in(url, "wrong"), log_in(url, TOKEN)]) == [401, 303]


def test_tunnel_counts_as_the_user_who_opened_it(server: Server) -> None:
    """SECURITY.md: "A tunnel (`ssh -L`, `kubectl port-forward`) counts as the user who opened it."."""
    parts = urlsplit(server.url)

    def request_through(run: Callable[[Callable[[], None]], None]) -> int:
        with socket.create_server(("127.0.0.1", 0)) as listening:

            def forward_one() -> None:
                near, _ = listening.accept()
                far = socket.create_connection((parts.hostname or "", parts.port or 0))
                with near, far:
                    far.sendall(near.recv(1 << 16))
                    while data := far.recv(1 << 16):
                        near.sendall(data)

            tunnel = threading.Thread(target=lambda: run(forward_one))
            tunnel.start()
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            status, _ = request(url, "GET", "/api/v1/jobs", Connection="close")
            tunnel.join()
            return status

    assert request_through(run_as_other_user) == 403
    assert request_through(lambda forward: forward()) == 200


def test_connection_that_is_closed_immediately_is_not_taken_for_root(server: Server) -> None:
    """The kernel attributes what remains of a closed socket to root."""
    parts = urlsplit(server.url)
    message = (
        b"POST /api/v1/heartbeats HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s"
    )
    body = make_heartbeat(job="closed")

    def send_and_close() -> None:
        for _ in range(200):
            with socket.create_connection((parts.hostname or "", parts.port or 0)) as connection:
                connection.sendall(message % (len(body), body))

    run_as_other_user(send_and_close)
    time.sleep(1)
    assert server.get_items("jobs") == []


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder in which everybody may create files, and replace their own, as in /tmp."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o1777)
        yield Path(folder)


def write_settings(folder: Path, owner: int, mode: int = 0o644) -> Path:
    """Settings that name a command, which leaves a file; returns that file."""
    mark = folder / "mark"
    file = folder / "hangwatch.toml"
    file.write_text(f"alert_command = '/bin/touch {mark}'\n")
    file.chmod(mode)
    os.chown(file, owner, -1)
    return mark


@pytest.mark.parametrize(
    ("owner", "mode", "folder_owner", "folder_mode", "problem"),
    [
        (OTHER_UID, 0o644, 0, 0o1777, "hangwatch.toml belongs to another user"),
        (OTHER_UID, 0o644, 0, 0o755, "hangwatch.toml belongs to another user"),
        (0, 0o666, 0, 0o755, "hangwatch.toml can be written by other users"),
        (0, 0o664, 0, 0o755, "hangwatch.toml can be written by other users"),
        (0, 0o644, OTHER_UID, 0o755, "belongs to another user"),
        (0, 0o644, 0, 0o775, "can be written by other users"),
        (0, 0o644, 0, 0o755, ""),
        (0, 0o644, 0, 0o1777, ""),
    ],
)
def test_settings_that_others_can_change_are_not_read(
    shared_folder: Path, owner: int, mode: int, folder_owner: int, folder_mode: int, problem: str
) -> None:
    """SECURITY.md: "Settings come only from files that nobody else can change."

    A server that root starts in such a folder runs no command that another user wrote there.
    """
    mark = write_settings(shared_folder, owner, mode)
    os.chown(shared_folder, folder_owner, -1)
    shared_folder.chmod(folder_mode)
    done = run_server_command("--test-alert", cwd=shared_folder)
    assert (done.returncode, mark.exists()) == ((2, False) if problem else (0, True)), done.stderr
    assert problem in done.stderr


def test_settings_behind_a_link_of_another_user_are_not_read(
    shared_folder: Path, tmp_path: Path
) -> None:
    mark = write_settings(tmp_path, 0)
    link = shared_folder / "hangwatch.toml"
    link.symlink_to(tmp_path / "hangwatch.toml")
    os.chown(link, OTHER_UID, -1, follow_symlinks=False)
    assert run_server_command("--test-alert", cwd=shared_folder).returncode == 2
    assert not mark.exists()
    os.chown(link, 0, -1, follow_symlinks=False)
    assert run_server_command("--test-alert", cwd=shared_folder).returncode == 0
    assert mark.exists()


def test_alert_command_of_another_user_is_refused(shared_folder: Path) -> None:
    """SECURITY.md: "nor with an `--alert-command` whose program is such a file"."""
    program = shared_folder / "notify"
    shutil.copy("/bin/true", program)
    flags = ("--test-alert", "--alert-command", str(program))
    assert run_server_command(*flags, cwd=Path("/")).returncode == 0
    os.chown(program, OTHER_UID, -1)
    done = run_server_command(*flags, cwd=Path("/"))
    assert (done.returncode, f"{program} belongs to another user" in done.stderr) == (2, True)


def test_start_line_names_the_file_with_the_settings(tmp_path: Path) -> None:
    """SECURITY.md: "Its start line names the file that it read."."""
    write_settings(tmp_path, 0)
    with run_server(tmp_path) as running:
        first_line = running.read_log().splitlines()[0]
        assert first_line.endswith(f", settings from {tmp_path}/hangwatch.toml")


def test_run_dir_that_another_user_has_taken_is_replaced(
    shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SECURITY.md: "Another user who takes the name of a run dir keeps no job from being watched.", "the
    ranks use the next one that is free, and follow no link".
    """
    monkeypatch.setenv("HANGWATCH_RUN_DIR", str(shared_folder))
    url = "http://127.0.0.1:1"
    first = ensure_run_dir(url)
    shutil.rmtree(first.parent)
    names = [shared_folder / f"{first.parent.name}{suffix}" for suffix in ("", "-1", "-2", "-3")]
    target = shared_folder / "target"

    def take_names() -> None:
        names[0].mkdir(mode=0o777)
        names[1].write_text("")
        names[2].symlink_to(target)
        names[3].symlink_to(shared_folder / "missing")
        target.mkdir()
        target.chmod(0o777)
        (target / first.name).mkdir()

    run_as_other_user(take_names)
    assert find_run_dir(url) is None, "no link is followed"
    made = ensure_run_dir(url)
    assert made == shared_folder / f"{first.parent.name}-4" / first.name
    assert [path.name for path in target.iterdir()] == [first.name]
    run_as_other_user(names[1].unlink)
    assert ensure_run_dir(url) == find_run_dir(url) == made, "as the ranks that run already"


def test_rank_is_watched_where_another_user_has_taken_the_name(
    shared_folder: Path, tmp_path: Path
) -> None:
    """With a real job, its node agent and a real server."""
    run_as_other_user(lambda: (shared_folder / "hangwatch-0").mkdir())
    with run_server(tmp_path / "server") as running:
        code = "import torch.distributed as d; d.init_process_group('gloo'); d.barrier(); input()"
        environ = clean_environment(
            HANGWATCH_URL=running.url,
            HANGWATCH_RUN_DIR=str(shared_folder),
            RANK="0",
            WORLD_SIZE="1",
            MASTER_ADDR="localhost",
            MASTER_PORT="0",
        )
        rank = subprocess.Popen([sys.executable, "-c", code], env=environ, stdin=subprocess.PIPE)
        try:
            wait_for_value(lambda: running.get_items("ranks"), "the rank is reported", 60.0)
        finally:
            rank.communicate(b"\n")
        assert rank.returncode == 0


def test_other_user_cannot_truncate_a_ring(shared_folder: Path) -> None:
    """SECURITY.md: "No other user can open a ring."."""
    with open_testbed(shared_folder) as testbed:
        rank = testbed.start_rank(0, "sleep")
        (ring,) = testbed.folder.glob("*.ring")
        testbed.folder.chmod(0o711)  # only the ring's own mode counts
        for action in (lambda: os.truncate(ring, 0), lambda: os.close(os.open(ring, os.O_RDONLY))):
            problem = run_as_other_user(functools.partial(find_problem, action))
            assert problem is PermissionError
        assert rank.poll() is None


def find_problem(action: Callable[[], None]) -> type[Exception] | None:
    try:
        action()
    except Exception as error:
        return type(error)
    return None


def run_server_command(*flags: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *flags], cwd=cwd, env=clean_environment(), capture_output=True, text=True
    )


def test_user_that_a_namespace_does_not_map_trusts_nobody(tmp_path: Path) -> None:
    """SECURITY.md: "A user without a mapping in its user namespace trusts no other process.", "a server of
    that user needs a token".
    """
    command = ("unshare", "--user", str(COMMAND))
    with_token = Server(tmp_path / "with token", ("--token", TOKEN), command=command)
    running = Server(tmp_path, command=command)
    try:
        with_token.start()
        assert with_token.get_items("jobs") == []
        running.start()
        assert run_as_other_user(lambda: request(running.url, "GET", "/healthz"))[0] == 200
        status, text = run_as_other_user(lambda: request(running.url, "GET", "/api/v1/jobs"))
        assert (status, "--token" in text) == (403, True)
        assert request(running.url, "GET", "/api/v1/jobs")[0] == 403
    finally:
        running.stop()
        with_token.stop()


def test_server_that_runs_as_a_user_of_its_own(
    shared_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Root needs no token; commands send theirs if the server's address is not loopback's.

    SECURITY.md: "everything, without a token if the server listens on loopback", "The `hangwatch` command
    does not send it to another user's process on this machine".
    """
    # The folder in which hangwatch is installed may be closed to other users.
    caps = [f"--{kind}-caps=+dac_read_search" for kind in ("inh", "ambient")]
    command = ("setpriv", f"--reuid={OTHER_UID}", "--clear-groups", *caps, str(COMMAND))
    folders = [shared_folder / name for name in ("without token", "with token")]
    for folder in folders:
        folder.mkdir()
        os.chown(folder, OTHER_UID, -1)
    without_token = Server(folders[0], command=command)
    running = Server(folders[1], ("--host", "0.0.0.0", "--token", TOKEN), command=command)
    try:
        without_token.start()
        assert request(without_token.url, "GET", "/api/v1/jobs")[0] == 200
        running.start()
        flags = ["status", "--token", TOKEN, "--url"]
        assert main([*flags, running.loopback_url]) == 1
        problem = capsys.readouterr().err
        assert "a process of another user (nobody) listens" in problem
        assert "give --url with the address by which other hosts reach it" in problem
        assert main([*flags, f"http://{find_outer_address()}:{running.port}"]) == 0
    finally:
        without_token.stop()
        running.stop()


def find_outer_address() -> str:
    """An address of this machine by which others could reach it."""
    with socket.socket(type=socket.SOCK_DGRAM) as unused:
        try:
            unused.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("the machine has no network")
        address: str = unused.getsockname()[0]
        return address


def test_node_agent_that_a_namespace_does_not_map_sends_nothing(
    agent_testbed: AgentTestbed,
) -> None:
    environ = agent_testbed.make_environ(
        HANGWATCH_TOKEN="", HANGWATCH_URL=agent_testbed.receiver.url
    )
    agent_testbed.start_rank(0, "sleep", env=environ)
    agent_testbed.command_prefix = ["unshare", "--user"]
    agent = agent_testbed.start_agent(env=environ)
    time.sleep(4.0)
    agent.terminate()
    log = agent.communicate(timeout=20)[1].decode()
    assert "a process of another user listens there" in log
    assert agent_testbed.receiver.requests == []


def find_free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port: int = unused.getsockname()[1]
        return port


def listen_as_impostor(port: int, reply: bytes, seconds: float) -> bytes:
    """All that is sent to a port within that time. Each request gets the reply."""
    received = bytearray()
    with socket.create_server(("127.0.0.1", port)) as listening:
        listening.settimeout(0.2)
        ends_at = time.monotonic() + seconds
        while time.monotonic() < ends_at:
            try:
                connection, _ = listening.accept()
            except TimeoutError:
                continue
            with connection:
                connection.settimeout(1.0)
                try:
                    received += connection.recv(1 << 20)
                    connection.sendall(
                        b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(reply), reply)
                    )
                    received += connection.recv(1 << 20)
                except OSError:
                    continue
    return bytes(received)


class Impostor(threading.Thread):
    """A process at the address of the server, usually another user's. It orders to end the rank."""

    def __init__(self, key: str, seconds: float = 6.0, *, is_foreign: bool = True) -> None:
        super().__init__(daemon=True)
        self.is_foreign = is_foreign
        self.port = find_free_port()
        self.received = b""
        commands = [{"id": "1", "kind": kind, "key": key} for kind in ("stacks", "abort")]
        self._reply = json.dumps({"interval_s": 0.2, "commands": commands}).encode()
        self._seconds = seconds

    def run(self) -> None:
        def listen() -> bytes:
            return listen_as_impostor(self.port, self._reply, self._seconds)

        self.received = run_as_other_user(listen) if self.is_foreign else listen()


@pytest.fixture
def agent_testbed(tmp_path: Path) -> Iterator[AgentTestbed]:
    with open_testbed(tmp_path) as made:
        yield made


@pytest.mark.parametrize("token", ["", TOKEN])
def test_impostor_gets_no_stack_and_ends_no_rank(agent_testbed: AgentTestbed, token: str) -> None:
    """SECURITY.md: "see stacks or the token, give orders", "such as names, programs and lines of
    calls", "a node agent without a token sends nothing to another user's process", "A node agent never sends the
    token.", "It signs its requests (HMAC-SHA256)".
    """
    environ = agent_testbed.make_environ(HANGWATCH_TOKEN=token)
    rank = agent_testbed.start_rank(0, "call", "sleep", env=environ)
    ticks = Path(f"/proc/{rank.pid}/stat").read_text().rpartition(")")[2].split()[19]
    impostor = Impostor(f"{rank.pid}-{ticks}")
    impostor.start()
    environ["HANGWATCH_URL"] = f"http://127.0.0.1:{impostor.port}"
    agent = agent_testbed.start_agent(env=environ)
    impostor.join(30)
    assert rank.poll() is None, "it was not ended"
    agent.terminate()
    log = agent.communicate(timeout=20)[1].decode()
    if token:
        assert b"Hangwatch :" in impostor.received, "the heartbeats are signed"
        bodies = impostor.received.decode(errors="replace")
        reported = ('"processes"', '"program":"node_target.py"', '"/job/train.py"')
        assert all(text in bodies for text in reported), "progress is reported"
        assert not any(key in bodies for key in ('"threads"', '"frames"', '"aborts"')), bodies
        assert token.encode() not in impostor.received
        assert "did not prove that it knows the token: nothing in its reply is applied" in log
    else:
        assert impostor.received == b""
        assert "a process of another user listens there" in log


@pytest.mark.parametrize(
    "words", [["status"], ["incidents"], ["dump", "0"], ["perf"]], ids=lambda words: words[0]
)
def test_commands_send_no_token_to_an_impostor(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """SECURITY.md: "The `hangwatch` command does not send it to another user's process"."""
    impostor = Impostor("", seconds=3.0)
    impostor.start()
    time.sleep(0.5)
    url = f"http://127.0.0.1:{impostor.port}"
    assert main([*words, "--url", url, "--token", TOKEN]) == 1
    (finding,) = check_server(url, TOKEN, {})
    impostor.join(30)
    assert TOKEN.encode() not in impostor.received
    assert not finding.ok
    assert "a process of another user (nobody) listens" in capsys.readouterr().err


def test_doctor_sends_the_token_to_nobody() -> None:
    """SECURITY.md: "and `hangwatch doctor` to nobody"."""
    impostor = Impostor("", seconds=3.0, is_foreign=False)
    impostor.start()
    time.sleep(0.5)
    assert len(list(check_server(f"http://127.0.0.1:{impostor.port}", TOKEN, {}))) == 1
    impostor.join(30)
    assert b"Hangwatch :" in impostor.received and TOKEN.encode() not in impostor.received


def test_commands_send_the_token_to_the_own_server(tmp_path: Path) -> None:
    with run_server(tmp_path, "--token", TOKEN) as running:
        url = f"http://127.0.0.1:{urlsplit(running.url).port}"
        assert main(["status", "--url", url, "--token", TOKEN]) == 0
        assert [finding.ok for finding in check_server(url, TOKEN, {})] == [True]
        job_token = derive_job_token(TOKEN, "mine")
        assert [finding.ok for finding in check_server(url, job_token, {})] == [True]
        assert [finding.ok for finding in check_server(url, "wrong-token", {})] == [False]


def test_server_with_token_is_known_by_its_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernel does not say whose it is, as on another host."""
    monkeypatch.setattr(client, "is_trusted_peer", lambda *_: False)
    with run_server(tmp_path, "--token", TOKEN) as running:
        parts = urlsplit(running.url)
        url = f"http://127.0.0.1:{parts.port}"

        def report(token: str) -> tuple[bool, str]:
            uplink = Uplink([ServerTarget(base_url=url, token=token)], lambda: None)
            outcome = uplink.execute_order(HeartbeatPost(json.loads(make_heartbeat(job="told"))))
            uplink.close()
            return outcome.reply is not None, outcome.problem

        assert report(TOKEN) == (True, "")
        accepted, problem = report("a wrong token, as long")
        assert (accepted, "401" in problem) == (False, True)


def test_token_of_a_job_covers_that_job_only(tmp_path: Path) -> None:
    """SECURITY.md: "report the jobs `NAME` and `NAME/…`", "read the API; report another job"."""
    with run_server(tmp_path, "--token", TOKEN) as running:
        url = running.loopback_url
        credential = Credential.from_token(derive_job_token(TOKEN, "mine"))
        jobs = (("mine", 200), ("mine/10.0.0.1:29500", 200), ("yours", 403))
        for pid, (job, status) in enumerate(jobs, 1):
            body = make_heartbeat(job=job, agent=f"agent of {job}", pid=pid)
            answer = post_signed(url, HEARTBEAT_PATH, body, credential)
            assert answer.status_code == status, answer.text
        token = credential.key.decode()
        reading = httpx.get(f"{url}/api/v1/jobs", headers={"Authorization": f"Bearer {token}"})
        assert reading.status_code == 401
        forged = Credential(b"guessed", "mine")
        assert post_signed(url, HEARTBEAT_PATH, b"{}", forged).status_code == 401
        exchanged = credential.sign_request(
            "POST",
            HEARTBEAT_PATH,
            make_heartbeat(job="mine"),
            fetch_server_time(url, credential),
        )
        answer = httpx.post(
            f"{url}/api/v1/heartbeats",
            content=make_heartbeat(job="yours"),
            headers={"Authorization": exchanged.header},
        )
        assert answer.status_code == 401
        known = httpx.get(f"{url}/api/v1/jobs", headers={"Authorization": f"Bearer {TOKEN}"})
        assert sorted(item["job"] for item in known.json()["items"]) == [
            "mine",
            "mine/10.0.0.1:29500",
        ]
