"""Arbitrary input, from the network or in a ring, is rejected or processed; it never crashes its
reader.

HANGWATCH_FUZZ=20000 tries that many inputs in each test.
"""

from __future__ import annotations

import asyncio
import copy
import gzip
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import generate_latest

from hangwatch.model.calls import Call, Signature, Site, StreamKind
from hangwatch.model.ranks import ExceptionInfo, ExitInfo, Frame, ThreadStack
from hangwatch.protocol import codec, heartbeat
from hangwatch.ring.layout import (
    HEADER_SIZE,
    HEAP,
    RECORDS,
    SIGNATURES,
    RingError,
)
from hangwatch.ring.reader import RingReader
from hangwatch.server.app import build_app
from hangwatch.server.core.problems import Problem
from hangwatch.server.http import heartbeats
from hangwatch.server.http.app_state import AppState
from hangwatch.server.http.metrics import StateCollector
from hangwatch.server.ingest.heartbeat_checks import check_memory, parse_heartbeat
from hangwatch.server.settings import Settings
from hangwatch.server.storage.store import Store
from tests.unit.agent.node.discovery.test_rings import make_ring

EXAMPLES = int(os.environ.get("HANGWATCH_FUZZ", "150"))
FUZZ_SETTINGS = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

NUMBER_STRATEGY = st.one_of(
    st.integers(-3, 3),
    st.integers(),
    st.floats(),
    st.sampled_from([1e308, -1e308, 2**63, -(2**63), 2**64]),
)
STRING_STRATEGY = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["0-", "0-9223372036854775808", "0-3:0", "3-0", "1,,2", "collective", "-1", "\0"]
    ),
)
LEAF_STRATEGY = st.one_of(st.none(), st.booleans(), NUMBER_STRATEGY, STRING_STRATEGY)
JSON_STRATEGY = st.recursive(
    LEAF_STRATEGY,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(STRING_STRATEGY, inner, max_size=3)
    ),
    max_leaves=6,
)
DocumentPath = tuple[Any, ...]


def make_full_heartbeat() -> dict[str, Any]:
    """A heartbeat with all fields."""
    site = Site(file="/u/train.py", line=41, function="step")
    signature = Signature(
        op="all_reduce", shapes=((64,),), dtype="float32", reduce_op="sum", agree=5
    )
    call = Call(seq=7, signature=signature, site=site, entered_s=1.0, blocking=True)
    thread = ThreadStack(
        thread="MainThread", frames=(Frame(function="f", file="t.py", line=3, text="x"),), main=True
    )
    processes = tuple(
        heartbeat.ProcessUpdate(
            key=f"{100 + rank}-5", lifecycle=3, step=8, phase="evaluate", phase_s=1.0, phase_limit_s=5.0, pulse_s=0.1, state="S",
            identity=heartbeat.ProcessIdentity(job="j", rank=rank, world_size=2, local_rank=rank, pid=100 + rank, start_ticks=5, master="m:1"),
            ended=ExitInfo(exit_status=1) if rank else None, raised=ExceptionInfo(type="E", message="m", site=site) if rank else None,
            faults=("a fault",), dropped=1, idle_s=9.0,
            streams=(
                heartbeat.StreamUpdate(
                    uid=1, entered=7, completed=6, chain=9, op="all_reduce", entered_s=9.0, pending_s=9.0, checkpoints=((4, 11), (6, 12)),
                    identity=heartbeat.StreamIdentity(kind=StreamKind.COLLECTIVE, name="0", desc="d", ranks="0-1"), calls=(call,),
                ),
            ),
        )
        for rank in range(2)
    )  # fmt: skip
    beat = heartbeat.Heartbeat(
        host="n", agent="a", number=1, full=True, processes=processes, gone=("9-9",),
        samples=(heartbeat.StackReply(key="100-5", request="r", source="py-spy", threads=(thread,)),),
        calls=(heartbeat.CallsReply(key="100-5", request="r", uid=1, calls=(call,)),), cost=heartbeat.AgentCost(cpu_s=1.0, memory=1),
    )  # fmt: skip
    document: dict[str, Any] = codec.encode_message(beat)
    return document


def iter_document_paths(value: Any, at: DocumentPath = ()) -> Iterator[DocumentPath]:
    yield at
    for key, inner in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    ):
        yield from iter_document_paths(inner, (*at, key))


def replace_at(value: Any, at: DocumentPath, new: Any) -> Any:
    if not at:
        return new
    made = copy.deepcopy(value)
    inner = made
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = new
    return made


def refusal_status(what: Callable[..., Any], *given: Any) -> int:
    """The status of the Problem that it raises; 0 where it does not."""
    try:
        what(*given)
    except Problem as problem:
        return problem.status
    return 0


HEARTBEAT_PATHS = list(iter_document_paths(make_full_heartbeat()))
CHANGES_STRATEGY = st.lists(
    st.tuples(st.sampled_from(HEARTBEAT_PATHS), JSON_STRATEGY), min_size=1, max_size=3
)


@pytest.fixture
def state(tmp_path: Path) -> Iterator[AppState]:
    store = Store(tmp_path)
    _, made = build_app(
        Settings(data_dir=tmp_path, stall_after=1.0),
        store=store,
        base_url="http://here",
        token=None,
    )
    yield made
    store.close()


@FUZZ_SETTINGS
@given(changes=CHANGES_STRATEGY)
def test_fuzzed_heartbeat_is_refused_or_harmless(
    changes: list[tuple[DocumentPath, Any]], state: AppState
) -> None:
    document: Any = make_full_heartbeat()
    for path, value in changes:
        try:
            document = replace_at(document, path, value)
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change removed this path
    body = json.dumps(document).encode()
    if status := refusal_status(parse_heartbeat, body):
        assert status == 422
        return
    beat = parse_heartbeat(body)
    assert not refusal_status(check_memory, beat, state.shared.fleet, 0.0)
    codec.encode_message(state.watch.apply_heartbeat(beat))
    asyncio.run(state.watch.loop.run_round())
    assert state.shared.failures.count == 0
    for attempt in state.list_latest_attempts():
        msgspec.json.encode(state.describe_job(attempt))
    assert generate_latest(StateCollector(state))
    for attempt in list(state.shared.fleet.attempts.values()):
        state.shared.fleet.forget_attempt(attempt)
        state.shared.fleet.drop_processes(attempt, 1 << 20)
    state.shared.incidents.drop_incidents(set(state.shared.incidents.records))


@FUZZ_SETTINGS
@given(
    body=st.one_of(
        st.binary(max_size=200), JSON_STRATEGY.map(lambda value: json.dumps(value).encode())
    ),
    packed=st.booleans(),
)
def test_invalid_body_is_refused(body: bytes, packed: bool) -> None:
    headers = {"content-encoding": "gzip"}

    def parse_compressed(sent: bytes) -> None:
        parse_heartbeat(heartbeats.unpack_body(headers, sent))

    for sent in (body, gzip.compress(body)[: None if packed else -3]):
        assert refusal_status(parse_compressed, sent) == 422
        assert refusal_status(parse_heartbeat, sent) == 422


@FUZZ_SETTINGS
@given(
    reply_fields=st.dictionaries(
        st.sampled_from(["interval_s", "resync", "commands", "x"]), JSON_STRATEGY
    )
)
def test_fuzzed_server_reply_is_parsed_or_rejected(reply_fields: dict[str, Any]) -> None:
    try:
        reply = codec.decode_reply(reply_fields)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return
    assert 0.05 <= reply.interval_s <= 60.0


OFFSET_STRATEGY = st.one_of(
    st.integers(0, 300),
    st.integers(0, HEADER_SIZE + 400),
    st.integers(RECORDS.offset, RECORDS.offset + 5000),
    st.integers(SIGNATURES.offset, SIGNATURES.offset + 9000),
    st.integers(HEAP.offset, HEAP.offset + 3000),
)


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return make_ring(tmp_path_factory.mktemp("ring")).path.read_bytes()


@FUZZ_SETTINGS
@given(
    patches=st.lists(
        st.tuples(OFFSET_STRATEGY, st.binary(min_size=1, max_size=16)), min_size=1, max_size=6
    ),
    cut=st.one_of(st.none(), OFFSET_STRATEGY),
)
def test_fuzzed_ring_is_rejected_or_read_within_its_limits(
    patches: list[tuple[int, bytes]], cut: int | None, ring: bytes
) -> None:
    bad = bytearray(ring)
    for at, new in patches:
        bad[at : at + len(new)] = new
    try:
        reader = RingReader(bytes(bad[:cut]))
        snapshot = reader.read_snapshot(10**18)
    except RingError:
        return
    reader.read_delta(0)
    calls_by_uid = reader.read_last_calls(10**18)
    for stream in snapshot.streams:
        calls_by_uid[stream.uid] = reader.read_calls(stream.uid, 10**18)
    for calls in calls_by_uid.values():
        assert len(calls) <= 64
        assert all(call.entered_s >= 0 and (call.duration_s or 0) >= 0 for call in calls)
