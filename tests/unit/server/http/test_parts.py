"""The server's smaller parts, each by itself."""

from __future__ import annotations

import asyncio
import base64
import gzip
import io
import json
import zipfile
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import datetime, timezone

import msgspec
import pytest
from starlette.datastructures import Headers

from hangwatch.diagnosis import EvidenceRequest
from hangwatch.model.calls import StreamKind
from hangwatch.model.incidents import Incident
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.ranks import AttemptKey, ExitInfo, Frame, Lifecycle, RankState, ThreadStack
from hangwatch.protocol import heartbeat
from hangwatch.server.core import limits
from hangwatch.server.core.clock import Clock
from hangwatch.server.core.events import EventLog
from hangwatch.server.core.job_views import RankView
from hangwatch.server.core.problems import Problem
from hangwatch.server.http import access, api, heartbeats
from hangwatch.server.http.access import (
    COOKIE_NAME,
    derive_session_value,
    has_session_cookie,
    has_token,
)
from hangwatch.server.incidents.records import IncidentRecord
from hangwatch.server.ingest.command_queue import REQUEST_EXPIRES_S, CommandQueue
from hangwatch.server.ingest.heartbeat_checks import parse_heartbeat
from hangwatch.server.monitor import views
from hangwatch.server.monitor.views import compute_states, count_states, describe_job_status
from hangwatch.server.ondemand.dumps import REPLY_TIMEOUT_S, DumpRegistry
from hangwatch.server.web.wait_graph import build_graph, draw_graph
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.fleet import Fleet
from tests.unit.incident_documents import make_incident as build_incident

MOMENT = datetime(2026, 1, 1, tzinfo=timezone.utc)


def make_incident(**more: object) -> Incident:
    fields: dict[str, object] = {
        "id": "01J00000000000000000000000",
        "job": "run7",
        "attempt": 0,
        "kind": VerdictKind.MISSING_RANK,
        "severity": Severity.ALERT,
        "status": "open",
        "onset_at": MOMENT,
        "opened_at": MOMENT,
        "summary": "rank 1 has not entered",
        "advice": "Look.",
        "culprits": [1],
        "waiting": [0],
        "waits": [{"rank": 0, "for": 1, "group": "0", "seq": 7}],
    }
    return build_incident(**{**fields, **more})


def make_attempt(ranks: int = 3, world: int = 4, now: float = 100.0) -> Attempt:
    fleet = Fleet()
    processes = tuple(
        heartbeat.ProcessUpdate(
            key=f"{r}-1",
            lifecycle=int(Lifecycle.INITIALISED),
            identity=heartbeat.ProcessIdentity(
                job="run7", rank=r, world_size=world, pid=r, start_ticks=1
            ),
        )
        for r in range(ranks)
    )
    fleet.apply_heartbeat(
        heartbeat.Heartbeat(host="n", agent="a", number=1, processes=processes), now
    )
    attempt = fleet.latest_attempt("run7")
    assert attempt is not None
    return attempt


class TestAccess:
    def test_every_token_form_is_accepted(self) -> None:
        def encode_basic(text: str) -> str:
            return "Basic " + base64.b64encode(text.encode()).decode()

        for good in (
            "Bearer s3cret",
            "bearer  s3cret",
            encode_basic(":s3cret"),
            encode_basic("any:s3cret"),
        ):
            assert has_token(Headers({"authorization": good}), "s3cret"), good
        for bad in (
            "",
            "Bearer",
            "Bearer s3cre",
            encode_basic(":other"),
            "Basic ~~~",
            encode_basic("s3cret"),
            "Digest s3cret",
            "Bearer é",
        ):
            assert not has_token(Headers({"authorization": bad}), "s3cret"), bad
        assert has_session_cookie(
            Headers({"cookie": f"a=b; {COOKIE_NAME}={derive_session_value('s3cret')}"}), "s3cret"
        )
        assert not has_session_cookie(Headers({"cookie": f"{COOKIE_NAME}=s3cret"}), "s3cret")

    def test_cross_site_request_is_refused(self) -> None:
        def is_cross_site(
            by_cookie: bool = False, known: str | None = None, method: str = "POST", **headers: str
        ) -> bool:
            http_headers = {name.replace("_", "-"): value for name, value in headers.items()}
            return access.is_cross_site(
                method, Headers({"host": "h:1", **http_headers}), known, by_cookie=by_cookie
            )

        assert not is_cross_site()
        assert is_cross_site(by_cookie=True)
        for site, expected in (
            ("same-origin", False),
            ("none", False),
            ("same-site", True),
            ("cross-site", True),
        ):
            assert is_cross_site(sec_fetch_site=site) is expected
        assert is_cross_site(origin="http://evil.example")
        assert is_cross_site(origin="null")
        assert not is_cross_site(origin="http://h:1", by_cookie=True)
        assert not is_cross_site(
            origin="https://watch.example", known="https://watch.example/x", by_cookie=True
        )
        assert not is_cross_site(sec_fetch_site="cross-site", method="GET")

    def test_only_loopback_names_are_local(self) -> None:
        for good in (
            "localhost",
            "localhost:8642",
            "127.0.0.1:8642",
            "[::1]:8642",
            "127.1.2.3",
            "a.localhost:1",
            "own",
        ):
            assert access.is_local_name(good, "own"), good
        for bad in (
            None,
            "",
            "evil.example",
            "10.0.0.1:8642",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "[::2]",
        ):
            assert not access.is_local_name(bad, "own"), bad

    def test_wrong_tokens_are_throttled(self) -> None:
        failures = access.LoginFailures()
        for number in range(access.MAX_FAILURES):
            assert failures.wait_s("a", number) == 0
            failures.add_failure("a", number)
        assert failures.wait_s("a", 10.0) == access.FAILURE_WINDOW_S - 10
        assert failures.wait_s("b", 10.0) == 0
        assert failures.wait_s("a", access.FAILURE_WINDOW_S) == 0


class TestIngest:
    def test_invalid_heartbeat_is_refused(self) -> None:
        sequence = {
            "uid": 1,
            "entered": 1,
            "identity": {"kind": "collective", "name": "0", "desc": "", "ranks": "0-"},
        }
        identity = {"job": "j", "rank": -1, "world_size": 4, "pid": 1, "start_ticks": 1}
        for processes in (
            [{"key": "1-1", "sequences": [sequence]}],
            [{"key": "1-1", "identity": identity}],
            [{"key": "1-1", "idle_s": float("nan")}],
            [{"key": 1}],
        ):
            body = {"host": "n", "agent": "a", "number": 1, "processes": processes}
            with pytest.raises(Problem) as raised:
                parse_heartbeat(json.dumps(body).encode())
            assert raised.value.status == 422

    def test_other_protocol_version_is_reported(self) -> None:
        for rest in (b'"host": "n", "agent": "a", "number": 1}', b'"new": "format"}'):
            with pytest.raises(Problem, match="same release"):
                parse_heartbeat(b'{"version": 3, ' + rest)

    def test_gzip_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert heartbeats.decompress_body(gzip.compress(b"{}")) == b"{}"
        monkeypatch.setattr(limits, "UNPACKED_BODY", replace(limits.UNPACKED_BODY, most=1000))
        for body, status in (
            (gzip.compress(b"0" * 2000), 413),
            (b"no gzip", 422),
            (gzip.compress(b"{}")[:-4], 422),
        ):
            with pytest.raises(Problem) as raised:
                heartbeats.decompress_body(body)
            assert raised.value.status == status


class TestStates:
    def test_each_state_has_its_evidence(self) -> None:
        attempt = make_attempt(ranks=9, world=10)
        processes = attempt.processes
        processes[1].lifecycle = Lifecycle.STARTING
        processes[2].exit, processes[3].exit, processes[4].exit = (
            ExitInfo(exit_status=0),
            ExitInfo(signal=9),
            ExitInfo(),
        )
        processes[5].activity.state, processes[5].activity.state_since = "T", 90.0
        processes[0].activity.state, processes[0].activity.state_since = (
            "t",
            99.9,
        )  # py-spy is sampling it
        processes[6].reports.last_seen_at = 50.0
        for process in processes.values():
            attempt.update_suspects(process)
        cases = [
            IncidentRecord(incident=make_incident(culprits=[7], waiting=[])),
            IncidentRecord(
                incident=make_incident(
                    kind=VerdictKind.SLOW_RANK, severity=Severity.WARNING, culprits=[8], waiting=[0]
                )
            ),
        ]
        states = compute_states(attempt, cases, 100.0)
        assert [states[r].value for r in range(10)] == [
            "running", "starting", "exited", "dead", "dead", "frozen", "lost", "stalled", "slow", "missing",
        ]  # fmt: skip

    def test_mismatch_without_hang_does_not_stall_job(self) -> None:
        cases = [IncidentRecord(incident=make_incident(kind=VerdictKind.MISMATCH, waiting=[]))]
        assert compute_states(make_attempt(), cases, 100.0)[1] is RankState.RUNNING

    def test_call_older_than_a_second_is_waiting(self) -> None:
        fleet = Fleet()
        sequence = heartbeat.StreamUpdate(
            uid=1,
            identity=heartbeat.StreamIdentity(
                kind=StreamKind.COLLECTIVE, name="0", desc="default_pg", ranks="0-1"
            ),
            entered=5,
            completed=4,
            op="all_reduce",
            pending_s=12.1,
        )
        identity = heartbeat.ProcessIdentity(job="j", rank=0, world_size=2, pid=1, start_ticks=1)
        update = heartbeat.ProcessUpdate(
            key="1-1", lifecycle=3, identity=identity, sequences=(sequence,)
        )
        fleet.apply_heartbeat(
            heartbeat.Heartbeat(host="n", agent="a", number=1, processes=(update,)), 100.0
        )
        attempt = fleet.attempts[AttemptKey("j", 0)]
        assert compute_states(attempt, [], 100.0) == {
            0: RankState.WAITING,
            1: RankState.MISSING,
        }
        assert count_states(attempt, [], 100.0) == {
            RankState.WAITING: 1,
            RankState.MISSING: 1,
        }
        document = msgspec.json.decode(
            msgspec.json.encode(views.describe_rank(attempt, 0, RankState.WAITING, 100.0))
        )
        assert document["waiting_s"] == 12.1
        assert document["groups"] == [
            {
                "name": "0",
                "desc": "default_pg",
                "ranks": [0, 1],
                "outside": [],
                "entered": 5,
                "completed": 4,
                "op": "all_reduce",
                "device": None,
                "incomplete": None,
            }
        ]


class TestCommandQueue:
    def test_requests_are_serialized_and_rate_limited(self) -> None:
        command_queue, job = CommandQueue(clock=Clock()), make_attempt()
        wants = [
            EvidenceRequest(rank=1, stacks=True),
            EvidenceRequest(rank=1, stream_uid=4, from_seq=2),
            EvidenceRequest(rank=77, stacks=True),
        ]
        command_queue.request_evidence(job, wants, 100.0)
        first = command_queue.take_unsent("a")
        assert [(c.ask.value, c.key, c.uid, c.from_seq) for c in first] == [
            ("stacks", "1-1", 0, 0),
            ("calls", "1-1", 4, 2),
        ]
        command_queue.request_evidence(job, wants, 105.0)
        assert command_queue.take_unsent("a") == ()
        command_queue.mark_answered("a", {first[0].id})
        command_queue.request_evidence(job, wants, 105.0)
        assert [c.ask.value for c in command_queue.take_unsent("a")] == ["stacks"]
        command_queue.request_evidence(job, wants, 100.0 + REQUEST_EXPIRES_S)
        assert [c.ask.value for c in command_queue.take_unsent("a")] == ["calls"]

    def test_command_waits_for_an_agent_that_reports_rarely(self) -> None:
        command_queue, job = CommandQueue(clock=Clock()), make_attempt()
        wants = [EvidenceRequest(rank=1, stacks=True)]
        command_queue.request_evidence(job, wants, 100.0)
        command_queue.drop_expired(115.0, report_interval_s=20.0)
        command_queue.request_evidence(job, wants, 115.0)
        assert len(command_queue.take_unsent("a")) == 1, "and is not repeated before it was sent"
        command_queue.request_evidence(job, wants, 131.0)
        command_queue.drop_expired(131.0, report_interval_s=0.5)
        assert len(command_queue.take_unsent("a")) == 1, "nobody answered the first one"
        command_queue.request_evidence(job, wants, 150.0)
        command_queue.drop_expired(150.0 + REQUEST_EXPIRES_S + 1.0, report_interval_s=0.5)
        assert command_queue.take_unsent("a") == ()

    def test_a_dump_ends_with_stacks_or_a_reason_for_each_rank(self) -> None:
        job = make_attempt()
        command_queue = CommandQueue(clock=Clock())
        dumps = DumpRegistry(clock=Clock(), command_queue=command_queue)
        job.processes[2].exit = ExitInfo(exit_status=0)
        requested = dumps.request_dump(job, [0, 1, 2], native=True, now=100.0)
        assert [(r.rank, r.status) for r in requested.ranks] == [
            (0, "pending"),
            (1, "pending"),
            (2, "failed"),
        ]
        commands = command_queue.take_unsent("a")
        assert [(c.key, c.native) for c in commands] == [("0-1", True), ("1-1", True)]
        thread = ThreadStack(
            thread="MainThread", frames=(Frame(function="f", file="t.py", line=3),), main=True
        )
        dumps.apply_samples(
            [
                heartbeat.StackReply(
                    key="0-1", request=commands[0].id, source="py-spy", threads=(thread,)
                )
            ],
            101.0,
        )
        pending = dumps.find_dump(requested.id, 102.0)
        assert pending is not None
        assert pending.status == "pending"
        assert pending.ranks[0].stacks[0].frames[0].line == 3
        expired = dumps.find_dump(requested.id, 100.0 + REPLY_TIMEOUT_S + 1)
        assert expired is not None
        assert (
            expired.status,
            expired.ranks[1].status,
            "did not reply" in (expired.ranks[1].error or ""),
        ) == ("done", "failed", True)


class TestEvents:
    def test_stream_resumes_or_resets(self) -> None:
        async def read_events(events: EventLog, last: str | None, count: int) -> list[str]:
            stream: AsyncIterator[str] = events.stream_events(last)
            return [await asyncio.wait_for(anext(stream), 5.0) for _ in range(count)]

        async def run_streams() -> None:
            events = EventLog(run_id="R")
            for n in range(3):
                events.publish_event("rank", {"rank": n})
            assert await read_events(events, "R-2", 2) == [
                "retry: 2000\n\n",
                'id: R-3\nevent: rank\ndata: {"rank":2}\n\n',
            ]
            assert "event: reset" in (await read_events(events, "Q-2", 2))[1]
            assert "event: reset" in (await read_events(events, "R-9", 2))[1]
            stream = events.stream_events(None)
            await anext(stream)
            events.publish_event("job", {})
            assert "event: job" in await asyncio.wait_for(anext(stream), 5.0)
            events.close()
            assert [part async for part in events.stream_events("R-4")] == ["retry: 2000\n\n"]

        asyncio.run(run_streams())


def test_a_bundle_holds_the_incident_and_its_stacks() -> None:
    frame = {"function": "step", "file": "train.py", "line": 41, "text": "loss.backward()"}
    stack = {
        "ranks": [1],
        "thread": "MainThread",
        "source": "py-spy",
        "taken_at": "2026-01-01T00:00:00Z",
        "frames": [frame],
    }
    packed = api.build_archive(
        make_incident(stacks=[stack]),
        [RankView(job="run7", attempt=0, rank=1, state=RankState.STALLED)],
    )
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        assert json.loads(archive.read("incident.json"))["waits"][0]["for"] == 1
        assert json.loads(archive.read("ranks.json"))[0]["state"] == "stalled"
        assert (
            "    step (train.py:41)\n        loss.backward()" in archive.read("stacks.txt").decode()
        )


def test_graph_counts_omitted_waits_and_separates_arrows() -> None:
    calls = [{"ranks": list(range(1, 500)), "seq": 7, "op": "all_reduce"}]
    kept = [{"rank": r, "for": 0, "group": "0", "seq": 7} for r in range(1, 65)]
    many = make_incident(
        culprits=[0],
        waiting=list(range(1, 500)),
        waits=kept,
        calls=calls,
        seq=7,
        group={"name": "0", "desc": "", "ranks": []},
    )
    assert [(len(c.ranks), c.is_culprit) for c in build_graph(many).classes] == [
        (1, True),
        (499, False),
    ]
    cycle = [
        {"rank": 0, "for": 1, "group": "1", "seq": 6},
        {"rank": 1, "for": 0, "group": "2", "seq": 6},
    ]
    drawn = draw_graph(
        build_graph(
            make_incident(kind=VerdictKind.DEADLOCK, culprits=[0, 1], waiting=[], waits=cycle)
        )
    )
    assert [(arrow.waiter, arrow.anchor) for arrow in drawn.arrows] == [(0, "end"), (1, "start")]


def test_headline_names_line_of_single_culprit() -> None:
    site = {"file": "/u/train.py", "line": 41, "function": "step"}
    assert (
        views.format_verdict(make_incident(site=site))
        == "rank 1 has not entered: it is at train.py:41 in step"
    )
    assert (
        views.format_verdict(make_incident(site=site, summary="rank 1 is at train.py:41"))
        == "rank 1 is at train.py:41"
    )
    assert (
        views.format_verdict(make_incident(site=site, culprits=[1, 2])) == "rank 1 has not entered"
    )
    assert (
        views.format_verdict(make_incident(site=site, kind=VerdictKind.EXITED_RANK))
        == "rank 1 has not entered"
    )


def test_headline_names_first_of_many_unreported_ranks() -> None:
    job = make_attempt(ranks=3, world=100_000)
    view = views.describe_job(job, count_states(job, [], 100.0), [], 100.0)
    assert (
        "Not reported yet: ranks 3-99999." in describe_job_status(job, view, 60.0, None, 100.0)[1]
    )
    for rank in range(5, 100_000, 2):
        job.processes[rank] = job.processes[0]
    text = describe_job_status(job, view, 60.0, None, 100.0)[1]
    assert "Not reported yet: ranks 3-4, 6, 8, 10, " in text and len(text) < 250
