"""Lists of servers, and the order in which node agents try them."""

from __future__ import annotations

from collections import Counter

import pytest

from hangwatch.agent.node.reporting.uplink import Uplink
from hangwatch.agent.transport.client import ServerTarget, TargetError, order_targets, parse_targets
from tests.simulation.http_receiver import (
    HttpReceiver,
    HttpReply,
    ReceivedRequest,
    make_json_reply,
)

URLS = "http://:secret@a:1, http://b:2/,http://c:3"


class RefusingServer(HttpReceiver):
    def __init__(self, status: int) -> None:
        super().__init__()
        self.status = status

    def make_reply(self, request: ReceivedRequest) -> HttpReply:
        return make_json_reply({"detail": "no"}, self.status)


def test_list_of_servers() -> None:
    targets = parse_targets(URLS, "from-env")
    assert [(t.base_url, t.token) for t in targets] == [
        ("http://a:1", "secret"),
        ("http://b:2", "from-env"),
        ("http://c:3", "from-env"),
    ]
    assert parse_targets("http://a:1,http://a:1,") == (ServerTarget(base_url="http://a:1"),)
    for wrong in ("", "http://a:1,b:2"):
        with pytest.raises(TargetError, match="http://:TOKEN@master:8642"):
            parse_targets(wrong)


def test_each_job_has_an_order_of_its_own() -> None:
    targets = parse_targets(URLS)
    assert order_targets(targets, "run7") == order_targets(targets[::-1], "run7")
    firsts = Counter(order_targets(targets, f"run{n}")[0].base_url for n in range(300))
    assert min(firsts.values()) > 60 and len(firsts) == 3
    # Without one server, only its jobs move.
    for n in range(50):
        order = order_targets(targets, f"run{n}")
        assert order_targets(order[1:], f"run{n}") == order[1:]


def test_next_server_is_tried_if_one_does_not_take_a_heartbeat() -> None:
    with RefusingServer(421) as refusing, HttpReceiver() as taking:
        urls = ["http://127.0.0.1:9", refusing.url, taking.url]
        uplink = Uplink([ServerTarget(base_url=url) for url in urls], lambda: None)
        try:
            for _ in range(2):
                uplink.post_heartbeat({})
                outcome = uplink.take_outcome(10)
                assert outcome is not None and outcome.reply is not None
                assert uplink.target.base_url == taking.url
        finally:
            uplink.close()
    assert (len(refusing.requests), len(taking.requests)) == (1, 2)


def test_overloaded_server_keeps_its_agents() -> None:
    with RefusingServer(503) as overloaded, HttpReceiver() as other:
        targets = [ServerTarget(base_url=url) for url in (overloaded.url, other.url)]
        uplink = Uplink(targets, lambda: None)
        try:
            uplink.post_heartbeat({})
            outcome = uplink.take_outcome(10)
        finally:
            uplink.close()
    assert outcome is not None and outcome.reply is None and not outcome.is_misdirected
    assert other.requests == []


def test_heartbeat_with_a_job_decides_the_order() -> None:
    with HttpReceiver() as one, HttpReceiver() as two:
        targets = [ServerTarget(base_url=url) for url in (one.url, two.url)]
        job = next(j for j in map(str, range(99)) if order_targets(targets, j)[0] is targets[1])
        uplink = Uplink(targets, lambda: None)
        try:
            for identity in (None, {"job": f"{job}/127.0.0.1:29500"}):
                uplink.post_heartbeat({"processes": [{"identity": identity}]})
                assert uplink.take_outcome(10) is not None
        finally:
            uplink.close()
    assert (len(one.requests), len(two.requests)) == (1, 1)
