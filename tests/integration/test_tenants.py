"""One job's token can do nothing to another job, whatever is sent with it. On a real server, over real
sockets; each job reports with its own token.

SECURITY.md: a job's token may not "change, hide or delay what is reported" of another job.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from hangwatch.agent.node.requests.commands import CommandPoll
from hangwatch.agent.transport.client import ServerTarget
from hangwatch.model.ranks import ExitInfo, Lifecycle
from hangwatch.protocol import codec, heartbeat
from hangwatch.protocol.commands import CommandKind
from hangwatch.protocol.heartbeat import COMMANDS_PATH, HEARTBEAT_PATH
from hangwatch.protocol.request_signing import derive_job_token
from hangwatch.server.core import limits
from hangwatch.tracking.fleet import OWNER_SILENT_S
from tests.harness.server import Server, run_server
from tests.harness.signing import RequestSigner, SigningAuth
from tests.simulation.http_receiver import WebhookReceiver
from tests.simulation.job_reporter import JobReporter, post_heartbeat
from tests.simulation.simulated_job import SimulatedJob, make_hung_job
from tests.simulation.waiting import wait_for_value

TOKEN = "a-token-of-the-operator"
STALL_AFTER_S = 2.0
REPORTED_WITHIN_S = 15.0  # after the time at which the hang is due, on a machine with other work
JOBS_PER_HEARTBEAT = 60
# (kind, culprits)
FOUND = ("missing_rank", [2])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    flags = ("--token", TOKEN, "--stall-after", f"{STALL_AFTER_S:g}")
    with run_server(tmp_path, *flags) as started:
        started.url = f"http://:{TOKEN}@127.0.0.1:{started.port}"
        yield started


@contextlib.contextmanager
def open_client(server: Server, job: str | None) -> Iterator[httpx.Client]:
    """A client with the token of a job; None: the server's."""
    url = f"http://127.0.0.1:{server.port}"
    token = TOKEN if job is None else derive_job_token(TOKEN, job)
    with httpx.Client(
        base_url=url, auth=SigningAuth(url, token), trust_env=False, timeout=60
    ) as client:
        yield client


@pytest.fixture
def evil(server: Server) -> Iterator[httpx.Client]:
    with open_client(server, "evil") as client:
        yield client


@pytest.fixture
def victim(server: Server) -> Iterator[JobReporter]:
    """Has not reported yet. Rank 2 of its four ranks has just begun to hang."""
    with open_client(server, "victim") as client:
        yield JobReporter(client, make_hung_job(name="victim", hung_for_s=0.0))


def list_verdicts(server: Server, job: str) -> list[tuple[str, list[int]]]:
    found = server.get_items("incidents", job=job)
    return [(item["kind"], item["culprits"]) for item in found if item["status"] == "open"]


def report_until_found(server: Server, reporters: Iterable[JobReporter], job: str) -> float:
    """Returns the seconds until the job's hang is reported, or fails after some."""
    reporters, began_at = list(reporters), time.monotonic()
    while (waited_s := time.monotonic() - began_at) < STALL_AFTER_S + REPORTED_WITHIN_S:
        for reporter in reporters:
            for host in reporter.job.hosts:
                reporter.send_heartbeat(host)
        if list_verdicts(server, job) == [FOUND]:
            return waited_s
        time.sleep(0.2)
    pytest.fail(f"the hang was not reported: {server.get_items('incidents', job=job)}")


def make_flood(number: int, *, with_dead_rank: bool = False) -> heartbeat.Heartbeat:
    """A heartbeat of a node agent of its own, which reports many jobs of the family ``evil``."""
    updates = []
    for n in range(JOBS_PER_HEARTBEAT):
        for rank in range(1 + with_dead_rank):
            identity = heartbeat.ProcessIdentity(
                job=f"evil/{number}.{n}", rank=rank, world_size=2, pid=n, start_ticks=rank
            )
            updates.append(
                heartbeat.ProcessUpdate(
                    key=f"{n}-{rank}",
                    identity=identity,
                    lifecycle=int(Lifecycle.INITIALISED),
                    state="S",
                    ended=ExitInfo(signal=9) if rank else None,
                )
            )
    return heartbeat.Heartbeat(
        host=f"node{number}", agent=f"flood {number}", number=1, full=True, processes=tuple(updates)
    )


def post_flood(client: httpx.Client, beats: Iterable[heartbeat.Heartbeat]) -> list[int]:
    """The status of the answer to each heartbeat."""
    documents = [codec.encode_message(beat) for beat in beats]
    return [client.post(HEARTBEAT_PATH, json=document).status_code for document in documents]


def test_claimed_keys_of_another_jobs_ranks_hide_nothing(
    server: Server, evil: httpx.Client, victim: JobReporter
) -> None:
    """SECURITY.md: "A credential owns what it reports". The claim comes first, as from somebody who
    reads /proc.
    """
    healthy = replace(victim.job, name="evil", late_ranks=set())
    claimer = JobReporter(evil, healthy)
    claimer.send_heartbeat()
    report_until_found(server, [claimer, victim], "victim")
    assert {job["job"] for job in server.get_items("jobs")} == {"evil", "victim"}
    assert list_verdicts(server, "evil") == []


def test_number_of_another_jobs_heartbeats_is_its_own(
    server: Server, evil: httpx.Client, victim: JobReporter
) -> None:
    """SECURITY.md: "The node agents and processes of another credential have other names"."""
    victim.job.resume_training()
    victim.send_heartbeat()
    claim = heartbeat.Heartbeat(host="node1", agent=victim.agent_id(), number=2**60)
    post_heartbeat(evil, claim)
    victim.job.hang_ranks(2)
    report_until_found(server, [victim], "victim")


def test_silent_jobs_ranks_are_not_declared_dead(
    server: Server, evil: httpx.Client, victim: JobReporter
) -> None:
    """SECURITY.md: "change, hide or delay what is reported of one"."""
    victim.job.resume_training()
    victim.send_heartbeat()
    time.sleep(OWNER_SILENT_S + 1.0)
    forged = replace(victim.job.make_process_update(1, full=False), ended=ExitInfo(signal=9))
    for number in range(1, 11):
        for agent in ("forger", victim.agent_id()):
            post_heartbeat(
                evil,
                heartbeat.Heartbeat(
                    host="node1",
                    agent=agent,
                    number=number,
                    processes=(forged,),
                    gone=(forged.key,),
                ),
            )
        time.sleep(0.2)
    assert server.get_items("incidents", job="victim") == []
    ranks = server.get_items("ranks", job="victim")
    assert "dead" not in {rank["state"] for rank in ranks} and len(ranks) == 4


def test_job_is_reported_with_its_token_and_with_the_servers(server: Server) -> None:
    """One host's node agent has the job's token, and the other's the server's.

    SECURITY.md: "can report any job that no active node agent reports".
    """
    job = SimulatedJob(ranks=4, ranks_per_host=2, name="victim", late_ranks={2})
    with open_client(server, "victim") as own, open_client(server, None) as operator:
        reporters = [JobReporter(own, job), JobReporter(operator, job)]
        deadline = time.monotonic() + STALL_AFTER_S + REPORTED_WITHIN_S
        while list_verdicts(server, "victim") != [FOUND]:
            assert time.monotonic() < deadline
            for host, reporter in enumerate(reporters):
                reporter.send_heartbeat(host)
            time.sleep(0.2)
        # A node agent that was restarted with the other token takes its processes over.
        successor = JobReporter(operator, job, agent="successor")
        for host in job.hosts:
            successor.send_heartbeat(host)
        successor.end_job()
    [listed] = server.get_items("jobs")
    assert (listed["state"], listed["attempt"]) == ("finished", 0)


def test_attempts_of_one_job_leave_room_for_others(
    server: Server, evil: httpx.Client, victim: JobReporter
) -> None:
    """SECURITY.md: "it may take half of what others leave"."""
    statuses = post_flood(evil, map(make_flood, range(39)))
    accepted = statuses.count(200) * JOBS_PER_HEARTBEAT
    assert (statuses[0], statuses[-1]) == (200, limits.ATTEMPTS.status)
    assert accepted <= limits.ATTEMPTS.maximum // 2
    report_until_found(server, [victim], "victim")
    refused = f'hangwatch_limit_refusals_total{{limit="{limits.ATTEMPTS.name}"}} '
    with open_client(server, None) as client:
        metrics = client.get("/metrics", auth=("", TOKEN)).text
    assert f"{refused}{statuses.count(429)}.0" in metrics


def test_incidents_and_alerts_of_one_job_do_not_delay_those_of_others(tmp_path: Path) -> None:
    """SECURITY.md: "Jobs take turns in the queues of heartbeats and alerts and in the rounds"."""
    with WebhookReceiver() as hook:
        hook.delay_s = 0.5
        flags = ("--token", TOKEN, "--stall-after", f"{STALL_AFTER_S:g}", "--alert", hook.url)
        with run_server(tmp_path, *flags) as server:
            server.url = f"http://:{TOKEN}@127.0.0.1:{server.port}"
            with open_client(server, "evil") as evil:
                post_flood(evil, (make_flood(n, with_dead_rank=True) for n in range(31)))

            def list_open_jobs() -> list[str]:
                return [item["job"] for item in server.get_items("incidents", status="open")]

            wait_for_value(lambda: len(list_open_jobs()) > 100, "incidents of the flood")
            with open_client(server, "victim") as client:
                victim = JobReporter(client, make_hung_job(name="victim", hung_for_s=0.0))
                report_until_found(server, [victim], "victim")
                found_at = time.monotonic()

                def is_alerted() -> bool:
                    requests = list(hook.requests)
                    return any(request.parse_json()["job"] == "victim" for request in requests)

                victim.send_until(is_alerted, "the alert")
                assert time.monotonic() - found_at < REPORTED_WITHIN_S
            assert len(list_open_jobs()) <= limits.OPEN_INCIDENTS.maximum + 1


def test_node_agents_of_one_job_do_not_slow_down_those_of_others(
    server: Server, evil: httpx.Client, victim: JobReporter
) -> None:
    """SECURITY.md: "only the hosts of a large job report less often because of its size"."""
    agents = 1500
    beats = (heartbeat.Heartbeat(host="n", agent=f"a{n}", number=1) for n in range(agents))
    assert set(post_flood(evil, beats)) == {200}
    # As one of 1,501 hosts, it would report every three seconds, and could not wait for commands.
    reply = victim.send_heartbeat()
    assert reply["interval_s"] < 2.0 and reply["poll_s"] > 10
    report_until_found(server, [victim], "victim")


def test_large_heartbeats_of_one_job_do_not_delay_those_of_others(
    server: Server, victim: JobReporter
) -> None:
    """SECURITY.md: "A heartbeat is unpacked and decoded in its turn"."""
    pairs = b",".join(b'"key%016d":"value"' % number for number in range(1 << 20))
    packed = gzip.compress(b'{"host":"n","agent":"a","number":1,"extra":{%s}}' % pairs, 1)
    sent = Counter[int]()
    stopped = threading.Event()

    def send_large() -> None:
        with open_client(server, "evil") as client:
            while not stopped.is_set():
                headers = {"Content-Encoding": "gzip"}
                sent[client.post(HEARTBEAT_PATH, content=packed, headers=headers).status_code] += 1

    slowest_s = 0.0
    with ThreadPoolExecutor(30) as pool:
        flood = [pool.submit(send_large) for _ in range(30)]
        try:
            time.sleep(3.0)
            victim.job.hang_ranks(2)
            while list_verdicts(server, "victim") != [FOUND]:
                victim.send_heartbeat()
                began_at = time.monotonic()
                victim.client.get("/healthz").raise_for_status()
                slowest_s = max(slowest_s, time.monotonic() - began_at)
                assert began_at - victim.job.late_since < STALL_AFTER_S + 5.0
        finally:
            stopped.set()
    for sender in flood:
        sender.result()
    assert sent[200] > 5, sent
    assert slowest_s < 2.0


def test_waiting_agents_of_one_job_leave_room_for_others(
    server: Server, evil: httpx.Client, victim: JobReporter
) -> None:
    """SECURITY.md: "requests that wait for commands"."""
    share = limits.WAITING_AGENTS.maximum // 2
    beats = [heartbeat.Heartbeat(host="n", agent=f"a{n}", number=1) for n in range(share + 8)]
    assert set(post_flood(evil, beats)) == {200}
    victim.job.resume_training()
    assert victim.send_heartbeat()["poll_s"] > 10
    url = f"http://127.0.0.1:{server.port}"
    signer = RequestSigner(url, derive_job_token(TOKEN, "evil"))
    with contextlib.ExitStack() as kept:
        for beat in beats:
            body = json.dumps({"agent": beat.agent}).encode()
            head = (
                f"POST {COMMANDS_PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
                f"Authorization: {signer.make_header('POST', COMMANDS_PATH, body)}\r\n\r\n"
            )
            connection = socket.create_connection(("127.0.0.1", server.port))
            kept.enter_context(connection).sendall(head.encode() + body)
        connection.settimeout(20.0)
        assert connection.recv(100).startswith(b"HTTP/1.1 429"), "the last one is beyond its share"
        woken = threading.Event()
        poll = CommandPoll(victim.agent_id(), woken.set)
        kept.callback(poll.close)
        token = derive_job_token(TOKEN, "victim")
        poll.permit(25.0, ServerTarget(base_url=url, token=token))
        time.sleep(1.0)
        server.post("dumps", {"job": "victim", "ranks": [0], "native": False})
        assert woken.wait(20.0)
        assert [command.kind for command in poll.take_commands()] == [CommandKind.STACKS]
