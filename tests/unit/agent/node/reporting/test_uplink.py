"""The servers that heartbeats go to, and the messages if they do not arrive."""

from __future__ import annotations

import time

import pytest

from hangwatch.agent.node.reporting.uplink import (
    HeartbeatOutcome,
    Uplink,
    draw_backoff_s,
    encode_body,
    explain_status,
    parse_retry_after_s,
)
from hangwatch.agent.transport.client import ServerTarget, TargetError
from hangwatch.server.monitor.cadence import MAX_USUAL_INTERVAL_S
from tests.simulation.http_receiver import HttpReceiver


@pytest.mark.parametrize(
    ("url", "base", "token"),
    [
        ("http://:s3cret@master:8642", "http://master:8642", "s3cret"),
        ("https://s3cret@master/watch/", "https://master/watch", "s3cret"),
        ("http://master:8642", "http://master:8642", "from-env"),
        ("http://:a%40b@[::1]:8642/", "http://[::1]:8642", "a@b"),
    ],
)
def test_a_url_and_its_token(url: str, base: str, token: str) -> None:
    assert ServerTarget.from_url(url, "from-env") == ServerTarget(base_url=base, token=token)
    assert "s3cret" not in str(ServerTarget.from_url(url))


@pytest.mark.parametrize("url", ["", "master:8642", "ftp://master", "http://", "http://[::1"])
def test_invalid_url_error_shows_an_example(url: str) -> None:
    with pytest.raises(TargetError, match="http://:TOKEN@master:8642"):
        ServerTarget.from_url(url)


def test_backoff_grows_to_ten_seconds_with_full_jitter() -> None:
    bounds = []
    for failures in range(1, 8):
        draw_backoff_s(failures, lambda low, high: bounds.append((low, high)) or 0.0)  # type: ignore[func-returns-value]
    assert bounds == [(0, 1), (0, 2), (0, 4), (0, 8), (0, 10), (0, 10), (0, 10)]


def test_errors_name_a_remedy() -> None:
    assert "HANGWATCH_URL= line" in explain_status(401, "http://m")
    assert "not a hangwatch server" in explain_status(404, "http://m")
    assert "same hangwatch on both sides" in explain_status(422, "http://m")
    assert explain_status(503, "http://m") == "http://m answers 503"
    assert (
        explain_status(413, "http://m", "at most 5 groups")
        == "http://m does not accept this node agent's heartbeat (413): at most 5 groups"
    )


def test_retry_after_is_limited_to_a_minute() -> None:
    assert [
        parse_retry_after_s(header)
        for header in ("", "5", "100000", "-1", "Wed, 21 Oct 2015 07:28:00 GMT")
    ] == [0, 5, 60, 0, 0]


def test_unreachable_server_is_an_outcome() -> None:
    uplink = Uplink([ServerTarget(base_url="http://127.0.0.1:9")], lambda: None, timeout_s=5)
    try:
        assert uplink.take_outcome() is None
        uplink.post_heartbeat({"x": "y"})
        assert uplink.is_busy
        outcome = uplink.take_outcome(10)
        assert isinstance(outcome, HeartbeatOutcome)
        assert (outcome.reply, outcome.is_refused) == (None, False)
        assert "no answer from http://127.0.0.1:9" in outcome.problem
        assert not uplink.is_busy
    finally:
        uplink.close()


def test_large_heartbeat_is_compressed() -> None:
    body, headers = encode_body({"x": "y" * 10_000}, urgent=False)
    assert 0 < len(body) < 1000
    assert headers["Content-Encoding"] == "gzip"


def test_reply_timeout_is_longer_only_with_queued_heartbeats() -> None:
    with HttpReceiver(delay_s=1.0) as receiver:
        uplink = Uplink([ServerTarget(base_url=receiver.url)], lambda: None, timeout_s=0.3)
        try:
            uplink.post_heartbeat({})
            hasty = uplink.take_outcome(10)
            uplink.post_heartbeat({}, patient=True)
            patient = uplink.take_outcome(10)
        finally:
            uplink.close()
    assert hasty is not None and hasty.reply is None
    assert patient is not None and patient.reply is not None


def test_connection_is_kept_between_rare_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    now, passed = time.monotonic, [0.0]
    with HttpReceiver() as receiver:
        uplink = Uplink([ServerTarget(base_url=receiver.url)], lambda: None)
        monkeypatch.setattr(time, "monotonic", lambda: now() + passed[0])
        try:
            for _ in range(3):
                uplink.post_heartbeat({})
                assert (
                    outcome := uplink.take_outcome(10)
                ) is not None and outcome.reply is not None
                passed[0] += MAX_USUAL_INTERVAL_S + 1.0
        finally:
            uplink.close()
    clients = [request.client for request in receiver.requests]
    assert len(clients) == 3 and len(set(clients)) == 1
