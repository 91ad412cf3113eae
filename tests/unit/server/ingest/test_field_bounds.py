"""Every field of a heartbeat at its extremes: whatever one job reports, the server answers all requests,
diagnoses the other jobs, and its metrics are valid.

HANGWATCH_FUZZ=20000 tries that many heartbeats.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import functools
import json
import os
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from hangwatch.diagnosis import EvidenceRequest
from hangwatch.model.bounds import MAX_DURATION_US, Bucket
from hangwatch.performance.distributions import DurationHistogram
from hangwatch.protocol import codec
from hangwatch.protocol.commands import CommandKind
from hangwatch.protocol.heartbeat import Heartbeat
from hangwatch.server.app import build_app
from hangwatch.server.http.access import PEER_UID
from hangwatch.server.http.app_state import AppState
from hangwatch.server.ondemand.recordings import RecordingRequest
from hangwatch.server.settings import Settings
from hangwatch.server.storage.store import Store
from hangwatch.tracking.attempt import Attempt
from tests.simulation.simulated_job import make_hung_job

EXAMPLES = int(os.environ.get("HANGWATCH_FUZZ", "25"))
PAGES = (
    "/ranks", "/incidents", "/performance", "/api/v1/jobs", "/api/v1/ranks", "/api/v1/groups",
    "/api/v1/incidents", "/api/v1/performance", "/metrics",
)  # fmt: skip
# The part of a heartbeat with the replies to each kind of command.
REPLY_FIELDS = {
    CommandKind.STACKS: "samples",
    CommandKind.CALLS: "calls",
    CommandKind.HARDWARE: "hardware",
    CommandKind.TRACE: "traces",
    CommandKind.RECORD: "recordings",
}
# Python's json writes some of these differently, or not at all.
EXTREMES: dict[type, list[str]] = {
    int: [
        "-1", "0", "1", str(-(2**63)), str(2**63 - 1), str(2**64 - 1), str(2**64), "9" * 400, "1.7e308", "-1.7e308", '"7"',
    ],
    float: [
        "-1", "0", "5e-324", "1e9", "-1e9", "9.3e9", "2e10", "1.7e308", "-1.7e308", "1e400", "NaN", "Infinity", '"nan"', '"inf"',
    ],
    str: [
        '""', '"\\ud800"', '"\\u0000"', '"\\u202e\\u001b[2J"', '"%s {} {{x}} ${x}"', '"0-262143"', '"0-9223372036854775808"', '"-1"',
        json.dumps("x" * 65536), json.dumps("\U0001f600" * 65537), json.dumps("\n" * 1000), json.dumps("a/" * 120),
    ],
    bool: ["true", "false", "2"],
    list: ["[]", "null", "{}", "[[]]", "[null]"],
}  # fmt: skip
EXAMPLE_VALUES = {int: 1, float: 0.5, str: "x", bool: True}
EXAMPLE_TEXTS = {"key": "1-1", "ranks": "0-1", "job": "hostile", "op": "all_reduce"}

DocumentPath = tuple[Any, ...]
Change = tuple[DocumentPath, str]  # what replaces the value at the path, as JSON


def build_example(hint: Any, name: str = "") -> Any:
    """A document of this type in which every field is set."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return build_example(arguments[0], name)
    if type(None) in arguments:
        return build_example(arguments[0], name)
    if origin is tuple:
        return [build_example(argument, name) for argument in arguments if argument is not ...]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return next(iter(hint)).value
    if dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"):
        if name == "preceded_by":  # a call may be preceded by a call, and so on
            return None
        hints = typing.get_type_hints(hint, include_extras=True)
        built = {field: build_example(inner, field) for field, inner in hints.items()}
        return list(built.values()) if hasattr(hint, "_fields") else built
    return EXAMPLE_TEXTS.get(name, "x") if hint is str else EXAMPLE_VALUES[hint]


@functools.cache
def make_document() -> dict[str, Any]:
    """A heartbeat in which every field of every message is set, of a job's two ranks."""
    document: dict[str, Any] = build_example(Heartbeat)
    (first,) = document["processes"]
    first["ended"], first["identity"]["world_size"], document["brief"] = None, 2, False
    second = json.loads(json.dumps(first).replace("1-1", "2-1"))
    second["identity"]["rank"] = 0
    document["processes"].append(second)
    return document


def iter_leaves(value: Any, at: DocumentPath = ()) -> Iterator[tuple[DocumentPath, type]]:
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from iter_leaves(inner, (*at, key))
        yield at, list
    elif value is not None:
        yield at, type(value)


CHANGES: list[Change] = [
    (path, text) for path, kind in iter_leaves(make_document()) if path for text in EXTREMES[kind]
]


def format_heartbeat(
    number: int, changes: Sequence[Change] = (), requests: dict[str, str] | None = None
) -> bytes:
    """`make_document` with these changes; ``requests`` has the ids that it replies to."""
    document = {**json.loads(json.dumps(make_document())), "number": number, "full": True}
    for name, request in (requests or {}).items():
        document[name][0]["request"] = request
    texts: dict[str, str] = {}
    for path, text in changes:
        inner = document
        try:
            for key in path[:-1]:
                inner = inner[key]
            mark = f"extreme {len(texts)}"
            inner[path[-1]] = mark
            texts[json.dumps(mark)] = text
        except (IndexError, KeyError, TypeError):
            continue  # an earlier change removed this path
    body = json.dumps(document)
    for quoted_mark, text in texts.items():
        body = body.replace(quoted_mark, text)
    return body.encode()


def check_metrics(text: str) -> None:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert abs(sample.value) < float("inf"), sample
            assert sample.value >= 0 or family.type == "gauge", sample


def request_everything(state: AppState, attempt: Attempt) -> dict[str, str]:
    """Requests of one rank whatever can be requested. Returns the id of each request."""
    shared = state.shared
    now = shared.now()
    rank, process = min(attempt.processes.items())
    evidence = [EvidenceRequest(rank=rank, stream_uid=uid) for uid in process.streams]
    evidence.append(EvidenceRequest(rank=rank, stacks=True))
    evidence.append(EvidenceRequest(rank=rank, hardware=True))
    shared.commands.request_evidence(attempt, evidence, now)
    if process.exit is None:
        shared.traces.start_session(attempt, [rank], now)
        shared.recordings.request_recording(attempt, RecordingRequest(ranks=[rank]), now)
    return {REPLY_FIELDS[c.kind]: c.id for c in shared.commands.take_unsent(process.agent)}


async def report_extremes(folder: Path, changes: Sequence[Change]) -> None:
    """A job reports these changes, and another job hangs: all that the server then shows."""
    store = Store(folder)
    app, state = build_app(
        Settings(data_dir=folder, stall_after=1.0), store=store, base_url="http://here", token=None
    )

    async def serve_own_user(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, PEER_UID: os.geteuid()}, receive, send)

    transport = httpx.ASGITransport(serve_own_user)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        requests: dict[str, str] = {}
        for number in (1, 2):
            body = format_heartbeat(number, changes, requests)
            response = await client.post("/api/v1/heartbeats", content=body)
            assert response.status_code in (200, 413, 422), response.text
            for attempt in [a for a in state.shared.fleet.attempts.values() if a.processes]:
                requests = request_everything(state, attempt)
        victim = make_hung_job(hung_for_s=60.0, name="victim")
        updates = victim.make_process_updates(0, full=True)
        beat = Heartbeat(host=victim.host, agent="v", number=1, full=True, processes=updates)
        response = await client.post("/api/v1/heartbeats", json=codec.encode_message(beat))
        assert response.status_code == 200
        await state.watch.loop.run_round()
        await state.watch.persistence.save_changes()
        assert state.shared.failures.count == 0
        assert state.watch.persistence.failures == 0
        found = [record.incident for record in state.shared.incidents.records.values()]
        assert [i.culprits for i in found if i.job == "victim"] == [(2,)]
        pages = [f"{prefix}/incidents/{i.id}" for i in found for prefix in ("", "/api/v1")]
        pages += [f"/api/v1/incidents/{i.id}/bundle" for i in found]
        for page in (*PAGES, *pages):
            for accept in ("application/json", "text/html"):
                response = await client.get(page, headers={"Accept": accept})
                assert response.status_code == 200, (page, response.text)
            if page == "/metrics":
                check_metrics(response.text)
    store.close()


@settings(max_examples=EXAMPLES, deadline=None, database=None)
@example(changes=[(("processes", 0, "phase"), '"\\ud800"')])
@example(changes=[(("processes", 0, "streams", 0, 9, "ranks"), '""')])
@example(changes=[(("performance", "streams", 0, "totals", 0, "calls"), "1.7e308")])
@given(changes=st.lists(st.sampled_from(CHANGES), min_size=1, max_size=3))
def test_extremes_of_one_job_harm_no_other(
    changes: list[Change], tmp_path_factory: pytest.TempPathFactory
) -> None:
    asyncio.run(report_extremes(tmp_path_factory.mktemp("data"), changes))


@pytest.mark.parametrize("value", [1e300, 3.4e38, -1e10])
def test_statistics_of_tensors_have_no_bounds_of_times(value: float, tmp_path: Path) -> None:
    at = ("traces", 0, "calls", 0, "values", "norm")
    asyncio.run(report_extremes(tmp_path, [(at, str(value))]))


def test_bucket_of_the_longest_duration_is_accepted() -> None:
    histogram = DurationHistogram()
    histogram.add_duration(MAX_DURATION_US)
    bounds = typing.get_args(Bucket)[1]
    assert list(histogram.counts) == [bounds.greatest]
