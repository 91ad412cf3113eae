"""Requests for more than the server gives: each gets an error that names the limit, and costs
no memory. On a real server, over real sockets.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from hangwatch.model.calls import Call, Signature, StreamKind
from hangwatch.model.ranks import Frame, ThreadStack
from hangwatch.protocol.codec import encode_message
from hangwatch.protocol.heartbeat import (
    HEARTBEAT_PATH,
    StackReply,
    StreamIdentity,
    StreamUpdate,
)
from hangwatch.server.core import limits
from tests.harness.problems import check_problem
from tests.harness.processes import read_cpu_s, read_resident_mb
from tests.harness.server import Server, run_server
from tests.simulation.job_reporter import JobReporter
from tests.simulation.simulated_job import SimulatedJob, make_hung_job
from tests.simulation.waiting import wait_for_value
from tests.unit.server.ingest.test_field_bounds import (
    CHANGES,
    PAGES,
    check_metrics,
    format_heartbeat,
)

MAX_GROWTH_MB = 40


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with run_server(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as made:
        yield made


@contextlib.contextmanager
def bounded_growth(server: Server, most_mb: float = MAX_GROWTH_MB) -> Iterator[None]:
    """The server's memory does not grow by more than that within."""
    before_mb = read_resident_mb(server.pid)
    yield
    grown_mb = read_resident_mb(server.pid) - before_mb
    assert grown_mb < most_mb


def read_refusals(client: httpx.Client, limit: limits.Limit) -> float:
    name = f'hangwatch_limit_refusals_total{{limit="{limit.name}"}} '
    (line,) = [part for part in client.get("/metrics").text.splitlines() if part.startswith(name)]
    return float(line.removeprefix(name))


@pytest.mark.parametrize(
    "request_of", [{"headers": {"x": "y" * 40_000}}, {"params": {"q": "y" * 40_000}}]
)
def test_long_head_is_refused(client: httpx.Client, request_of: dict[str, Any]) -> None:
    before = read_refusals(client, limits.HEAD)
    detail = check_problem(client.get("/healthz", **request_of), 431)
    assert detail == limits.HEAD.text
    assert read_refusals(client, limits.HEAD) == before + 1


@pytest.mark.parametrize(
    "head",
    [
        b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n",
        b"POST /login HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\n",
    ],
    ids=["headers", "trailers"],
)
def test_endless_head_costs_no_memory(server: Server, client: httpx.Client, head: bytes) -> None:
    before = read_refusals(client, limits.HEAD)
    with bounded_growth(server):
        assert send_until_closed(server, head, b"x: " + b"y" * 60_000 + b"\r\n") < 64 << 20
    assert read_refusals(client, limits.HEAD) == before + 1


def test_bodies_that_arrive_are_limited_together(server: Server, client: httpx.Client) -> None:
    """Each is as large as a heartbeat may be, and never complete.

    SECURITY.md: "those that arrive or wait may take 256 MiB together".
    """
    before = read_refusals(client, limits.BODIES)
    length = limits.BODY.maximum
    share = limits.BODIES.maximum // 2 // length
    head = f"POST {HEARTBEAT_PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n"
    parts = urlsplit(server.url)
    with (
        bounded_growth(server, share * length / 1e6 + MAX_GROWTH_MB),
        contextlib.ExitStack() as opened,
    ):
        for number in range(2 * share):
            connection = socket.create_connection((parts.hostname or "", parts.port or 0))
            opened.enter_context(connection)
            connection.sendall(head.encode())
            if number < share:
                connection.sendall(b" " * (length - 1))
            else:
                assert connection.recv(1 << 16).startswith(b"HTTP/1.1 503")
        assert read_refusals(client, limits.BODIES) == before + share
    wait_for_value(lambda: is_read(client), "that a heartbeat is read again")


def is_read(client: httpx.Client) -> bool:
    return client.post(HEARTBEAT_PATH, content=b"{}").status_code == 422


def test_reset_connections_cost_no_memory(server: Server) -> None:
    reset_connections(server, 200)  # what is allocated once
    with bounded_growth(server, 6):
        reset_connections(server, 3000)


def reset_connections(server: Server, count: int) -> None:
    """Sends a request on each connection, and resets it instead of closing it."""
    parts = urlsplit(server.url)
    for _ in range(count):
        with socket.create_connection((parts.hostname or "", parts.port or 0)) as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_pipelined_requests_are_limited(server: Server, client: httpx.Client) -> None:
    piece = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n" * 5000
    with bounded_growth(server):
        send_until_closed(server, b"", piece, count=1)
    assert read_refusals(client, limits.PIPELINED) >= 1


def send_until_closed(server: Server, head: bytes, piece: bytes, count: int = 10_000) -> int:
    """How many bytes were sent until the server closed the connection."""
    parts = urlsplit(server.url)
    sent = 0
    with (
        socket.create_connection((parts.hostname or "", parts.port or 0)) as connection,
        contextlib.suppress(OSError),
    ):
        connection.sendall(head)
        for _ in range(count):
            connection.sendall(piece)
            sent += len(piece)
        while connection.recv(1 << 16):
            pass
    return sent


def make_heartbeat(**update: Any) -> dict[str, Any]:
    identity = {"job": "j", "rank": 0, "world_size": 2, "pid": 1, "start_ticks": 1}
    return {
        "host": "n",
        "agent": update.pop("agent", "a"),
        "number": 1,
        "processes": [
            {"key": "1-1", "identity": {**identity, **update.pop("identity", {})}, **update}
        ],
    }


def make_groups(count: int, size: int) -> list[Any]:
    streams = [
        StreamUpdate(
            uid=number,
            entered=1,
            identity=StreamIdentity(
                kind=StreamKind.COLLECTIVE,
                name=str(number),
                desc="",
                ranks=f"0-{size - number}",
            ),
        )
        for number in range(count)
    ]
    groups: list[Any] = encode_message(streams)
    return groups


@pytest.mark.parametrize(
    ("update", "limit"),
    [
        ({"streams": make_groups(200, (1 << 18) - 1)}, limits.HEARTBEAT_MEMBERS),
        ({"streams": make_groups(1, 1 << 21)}, limits.RANK),
        ({"faults": ["f"] * 200_000}, limits.LIST),
    ],
    ids=["groups", "group", "list"],
)
def test_heartbeat_beyond_a_limit_is_refused(
    server: Server, client: httpx.Client, update: dict[str, Any], limit: limits.Limit
) -> None:
    """SECURITY.md: "Everything that is read has a limit", "A request beyond one gets an error that
    names it, and is counted".
    """
    before = read_refusals(client, limit)
    with bounded_growth(server):
        answer = client.post("/api/v1/heartbeats", json=make_heartbeat(**update))
        assert limit.text in check_problem(answer, limit.status)
    assert read_refusals(client, limit) == before + 1
    assert server.get_items("jobs") == []


@pytest.mark.parametrize(
    ("update", "field"),
    [
        ({"raised": {"type": "E", "message": "m" * 5_000_000}}, "raised.message"),
        ({"identity": {"job": "j" * 300}}, "identity.job"),
        ({"identity": {"rank": 1 << 21}}, "identity.rank"),
        ({"dropped": 1.7e308}, "dropped"),
    ],
    ids=["text", "name", "rank", "number"],
)
def test_value_out_of_bounds_is_refused(
    server: Server, client: httpx.Client, update: dict[str, Any], field: str
) -> None:
    with bounded_growth(server):
        response = client.post("/api/v1/heartbeats", json=make_heartbeat(**update))
        check_problem(response, 422)
        (error,) = response.json()["errors"]
        assert error["message"].endswith(f"at `$.processes[0].{field}`")
    assert server.get_items("jobs") == []


def test_extremes_of_every_field_harm_nobody(tmp_path: Path) -> None:
    """One job reports each field at its extremes, while another hangs.

    SECURITY.md: "each number and text of a heartbeat", "whatever one job reports, the hangs of
    others are reported".
    """
    with (
        run_server(tmp_path, "--stall-after", "2") as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client,
    ):
        victim = SimulatedJob(ranks=4, name="victim", host="victim")
        reporter = JobReporter.connect(server.url, victim)
        with reporter.reporting():
            client.post("/api/v1/heartbeats", content=format_heartbeat(1)).raise_for_status()
            with bounded_growth(server, 150):
                for number, change in enumerate(CHANGES[::8], 2):
                    body = format_heartbeat(number, [change])
                    response = client.post("/api/v1/heartbeats", content=body)
                    assert response.status_code in (200, 413, 422), (change, response.text)
                    if number == 100:
                        victim.hang_ranks(2)
            found = wait_for_value(reporter.list_incidents, "the victim's incident", 30.0)
            assert [(i["kind"], i["culprits"]) for i in found] == [("missing_rank", [2])]
            for page in PAGES:
                client.get(page).raise_for_status()
            metrics = client.get("/metrics").text
            check_metrics(metrics)
            assert "hangwatch_diagnosis_failures_total 0.0" in metrics
            assert "hangwatch_store_failures_total 0.0" in metrics
        assert "Traceback" not in server.read_log()


def test_large_unknown_member_takes_little_time(server: Server, client: httpx.Client) -> None:
    """The server handles no other request meanwhile."""
    pairs = b",".join(b'"key%016d":"value"' % number for number in range((1 << 21) - 100))
    body = gzip.compress(b'{"host":"n","agent":"a","number":1,"extra":{%s}}' % pairs, 1)
    before_s = read_cpu_s(server.pid)
    answer = client.post("/api/v1/heartbeats", content=body, headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 200, answer.text
    assert read_cpu_s(server.pid) - before_s < 2.5


def make_stack(frames: int, text: str) -> ThreadStack:
    made = tuple(Frame(function=f"{n}{text}", file=f"{n}{text}", line=n) for n in range(frames))
    return ThreadStack(thread="MainThread", frames=made, main=True)


def test_unrequested_stacks_cost_no_memory(tmp_path: Path) -> None:
    """SECURITY.md: "Evidence is accepted only if it was requested"."""
    with (
        run_server(tmp_path) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client,
    ):
        job = SimulatedJob(ranks=30, ranks_per_host=30, name="greedy")
        reporter = JobReporter(client, job)
        reporter.send_heartbeat()
        keys = [update.key for update in job.make_process_updates(0, full=False)]
        threads = tuple([make_stack(7000, "f" * 400)] * 5)  # 29 MB of JSON
        with bounded_growth(server, 500):  # for one heartbeat that is being decoded
            for number, key in enumerate(keys, 2):
                reply = StackReply(key=key, request="none", source="py-spy", threads=threads)
                beat = reporter.make_heartbeat(0, number, samples=(reply,))
                response = client.post(
                    "/api/v1/heartbeats",
                    content=gzip.compress(json.dumps(encode_message(beat)).encode(), 1),
                    headers={"Content-Encoding": "gzip"},
                )
                assert response.status_code == 200, response.text
        assert "hangwatch_unrequested_replies_total 30.0" in client.get("/metrics").text


class GreedyJob(SimulatedJob):
    """Its node agents reply to each request for stacks with as much as the server accepts."""

    def take_sample(self, command: dict[str, Any]) -> StackReply:
        reply = SimulatedJob.take_sample(self, command)
        return replace(reply, threads=(make_stack(500, "f" * 40),) * 20)


@contextlib.contextmanager
def reporting_greedy_job(server: Server) -> Iterator[None]:
    """Half of a job's 32 ranks wait for the others, until the context ends."""
    greedy = GreedyJob(ranks=32, ranks_per_host=8, name="greedy", host="greedy{}")
    greedy.hang_ranks(*range(0, 32, 2))
    with JobReporter.connect(server.url, greedy).reporting():
        yield


def test_greedy_job_loses_its_own_stacks(tmp_path: Path) -> None:
    """The server stays within its memory, and another job's hang is reported with its stack."""
    flags = ("--stall-after", "2", "--memory-mb", "200")
    with run_server(tmp_path, *flags) as server, reporting_greedy_job(server):
        wait_for_value(lambda: read_stacks_dropped(server) or None, "that stacks are dropped", 60.0)
        victim = JobReporter.connect(server.url, make_hung_job(hung_for_s=0.0, name="victim"))

        def find_stack() -> bool:
            victim.send_heartbeat()
            found = [server.get(f"incidents/{i['id']}") for i in victim.list_incidents()]
            return any(1 in s["ranks"] or 2 in s["ranks"] for i in found for s in i["stacks"])

        wait_for_value(find_stack, "the victim's incident with its stack", 30.0)
        assert read_resident_mb(server.pid) < 200
        victim.client.close()
        assert "stacks of job greedy" in server.read_log()
        assert "stacks of job victim" not in server.read_log()


def shows_deep_stack(server: Server) -> bool:
    listed = server.get_items("incidents", job="greedy")
    stacks = [s for i in listed for s in server.get(f"incidents/{i['id']}")["stacks"]]
    return any(len(stack["frames"]) == 500 for stack in stacks)


def test_greedy_job_delays_nobody(tmp_path: Path) -> None:
    """While a job's stacks arrive and are diagnosed, the server answers, and reports others' hangs."""
    slowest_s = {"/healthz": 0.0, "/ranks": 0.0}
    flags = ("--stall-after", "2", "--memory-mb", "200")
    with run_server(tmp_path, *flags) as server, reporting_greedy_job(server):
        for number in range(5):
            job = make_hung_job(hung_for_s=0.0, name=f"victim {number}")
            reporter = JobReporter.connect(server.url, job)
            while not reporter.list_incidents():
                reporter.send_heartbeat()
                for page, slowest in slowest_s.items():
                    began_at = time.monotonic()
                    reporter.client.get(page).raise_for_status()
                    slowest_s[page] = max(slowest, time.monotonic() - began_at)
            assert time.monotonic() - job.late_since < server.stall_after_s + 5.0
            reporter.end_job()
        wait_for_value(lambda: shows_deep_stack(server), "the greedy job's deep stacks")
    assert slowest_s["/healthz"] < 1.0
    assert slowest_s["/ranks"] < 2.0


def read_stacks_dropped(server: Server) -> float:
    text = httpx.get(f"{server.url}/metrics", trust_env=False, timeout=30).text
    return float(text.partition("\nhangwatch_stacks_dropped_total ")[2].split()[0])


def test_texts_of_known_processes_cost_no_memory(tmp_path: Path) -> None:
    """What a process may report again and again is cut to what real node agents send."""
    with (
        run_server(tmp_path) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client,
    ):
        job = SimulatedJob(ranks=8, name="greedy", host="greedy")
        reporter = JobReporter(client, job)
        reporter.send_heartbeat()
        with bounded_growth(server, 150):  # for one heartbeat that is being decoded
            for number, update in enumerate(job.make_process_updates(0, full=False), 2):
                grown = replace(update, faults=("f" * 60_000,) * 500)
                beat = reporter.make_heartbeat(0, number, processes=(grown,))
                response = client.post(
                    "/api/v1/heartbeats",
                    content=gzip.compress(json.dumps(encode_message(beat)).encode(), 1),
                    headers={"Content-Encoding": "gzip"},
                )
                assert response.status_code == 200, response.text


def test_calls_of_known_groups_stay_within_the_memory(tmp_path: Path) -> None:
    """A process reports unfinished calls of its groups without end."""

    def make_calls(uid: int, number: int) -> Iterator[Call]:
        for seq in range(4 * number, 4 * number + 4):
            shape = (1000 * uid + seq,) * 30
            yield Call(seq=seq, signature=Signature(op="all_to_all", shapes=(shape,)))

    with (
        run_server(tmp_path, "--memory-mb", "200") as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client,
    ):
        beat = {**make_heartbeat(streams=make_groups(500, 600)), "host": "n"}
        client.post("/api/v1/heartbeats", json=beat).raise_for_status()
        beat["processes"][0].pop("identity")
        largest_mb = 0.0
        for number in range(2, 62):
            streams = [
                StreamUpdate(uid, 999, completed=0, calls=tuple(make_calls(uid, number)))
                for uid in range(500)
            ]
            beat["processes"][0]["streams"] = encode_message(streams)
            response = client.post("/api/v1/heartbeats", json={**beat, "number": number})
            assert response.status_code == 200, response.text
            largest_mb = max(largest_mb, read_resident_mb(server.pid))
        assert "job j may add no processes" in server.read_log()
        assert largest_mb < 230, "by what arrives in the second between two checks"


def test_job_that_takes_the_most_memory_leaves_the_last_part_to_others(tmp_path: Path) -> None:
    """SECURITY.md: "From 85 % of it on, only the job that takes the most is refused"."""
    with (
        run_server(tmp_path, "--stall-after", "2", "--memory-mb", "200") as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client,
    ):

        def report_processes(number: int) -> httpx.Response:
            beat = make_heartbeat(
                agent=f"agent {number}",
                identity={"job": f"greedy/{number}", "unrecorded": "u" * 60_000},
            )
            (process,) = beat["processes"]
            beat["processes"] = [{**process, "key": f"{n}-1"} for n in range(150)]
            return client.post("/api/v1/heartbeats", json={**beat, "host": f"host {number}"})

        for number in range(60):
            response = report_processes(number)
            if response.status_code != 200:
                break
            time.sleep(1.0)
        assert "job 'greedy' takes the most of it" in check_problem(response, limits.MEMORY.status)
        assert read_resident_mb(server.pid) < 200
        victim = JobReporter.connect(server.url, make_hung_job(hung_for_s=0.0, name="victim"))
        victim.send_until(victim.list_incidents, "the victim's incident")
        victim.client.close()
        update = {**make_heartbeat(agent="agent 0"), "host": "host 0", "number": 2}
        update["processes"][0].pop("identity")
        answer = client.post("/api/v1/heartbeats", json=update)
        assert answer.status_code == 200, "what is known of the greedy job is reported all the same"


def test_agent_may_not_report_any_number_of_jobs(server: Server, client: httpx.Client) -> None:
    beat = make_heartbeat(agent="of many jobs")
    (process,) = beat["processes"]
    beat["processes"] = [
        {**process, "key": f"{n}-1", "identity": {**process["identity"], "job": f"job {n}"}}
        for n in range(limits.JOBS_PER_AGENT.maximum + 1)
    ]
    answer = client.post("/api/v1/heartbeats", content=json.dumps(beat))
    assert limits.JOBS_PER_AGENT.text in check_problem(answer, 429)
    assert "Retry-After" in answer.headers


def test_members_of_new_jobs_are_limited(tmp_path: Path) -> None:
    """The first heartbeat of each job counts, too. The server goes on to diagnose these jobs, which takes
    memory in which the limits of other tests must not be measured.

    SECURITY.md: "Holders of the server's token can fill its memory up to the documented limits".
    """
    statuses = []
    with (
        run_server(tmp_path / "server") as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client,
        bounded_growth(server, 1500),
    ):
        for number in range(20):
            beat = make_heartbeat(
                agent=f"agent {number}",
                identity={"job": f"wide {number}", "world_size": 1 << 18},
                streams=make_groups(1, (1 << 18) - 1),
            )
            beat["host"] = f"host {number}"
            statuses.append(client.post("/api/v1/heartbeats", json=beat).status_code)
    assert statuses[0] == 200
    assert statuses[-1] == limits.MEMBERS.status
    assert statuses.count(200) * 2 * (1 << 18) <= limits.MEMBERS.maximum


@pytest.mark.parametrize(
    "item", [b"1,", b"{},", b'{"key":"1-1"},', b"[],", b'"x",'], ids=lambda item: item.decode()
)
@pytest.mark.parametrize("field", ["processes", "gone", "samples"])
def test_tiny_body_with_millions_of_items_costs_no_memory(
    server: Server, client: httpx.Client, field: str, item: bytes
) -> None:
    for items in (400_000, 10_000_000 // len(item)):
        document = b'{"host":"n","agent":"a","number":1,"%s":[' % field.encode()
        packed = gzip.compress(document + item * items + item[:-1] + b"]}")
        with bounded_growth(server):
            for _ in range(3):
                response = client.post(
                    "/api/v1/heartbeats", content=packed, headers={"Content-Encoding": "gzip"}
                )
                assert response.status_code in (413, 422), response.text
                assert len(response.content) < 2000
