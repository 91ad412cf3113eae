"""Alerts in the formats of Slack, Teams, PagerDuty and Opsgenie, sent over HTTP to receivers of the test and
not to the services.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from hangwatch.server.alerting.alerter import OPENED, RESOLVED, compose_message
from hangwatch.server.alerting.channels import (
    AlertChannelError,
    AlertMessage,
    AppriseService,
    Opsgenie,
    PagerDuty,
    SlackBot,
    SlackWebhook,
    TeamsWebhook,
    build_slack_message,
    build_teams_message,
    make_channel,
)
from tests.simulation.http_receiver import (
    HttpReceiver,
    HttpReply,
    ReceivedRequest,
    make_json_reply,
)

from .test_alerter import MOMENT, make_incident

BASE_URL = "https://watch.example"
URL = f"{BASE_URL}/incidents/01J00000000000000000000000"
KEY = "0123456789abcdef0123456789abcdef"
HOSTILE = "<!channel> *now* [click](http://evil.example)"


class Service(HttpReceiver):
    """Answers each request as Slack does."""

    def __init__(self, **answer: Any) -> None:
        super().__init__()
        self.answer = answer or {"ok": True}

    def make_reply(self, request: ReceivedRequest) -> HttpReply:
        return make_json_reply({"ts": f"17.{len(self.requests)}", **self.answer})


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as running:
        yield running


def make_message(event: str = OPENED, now: datetime = MOMENT, **fields: object) -> AlertMessage:
    if event == RESOLVED:
        fields |= {"status": "resolved", "resolved_at": now}
    return compose_message(make_incident(**fields), event, BASE_URL, now)


def iter_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from iter_texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from iter_texts(item)


def test_slack_message_has_verdict_culprit_line_and_link() -> None:
    message = build_slack_message(make_message())
    header, verdict, facts, advice, actions = message["blocks"]
    assert header["text"]["text"] == "🛑 ALERT"
    assert verdict["text"]["text"].startswith("job run7: rank 1 has not entered all_reduce")
    assert [field["text"] for field in facts["fields"]] == [
        "Culprit: rank 1",
        "Waiting: 1 rank",
        "Line: /u/train.py:41 in load",
        "Kind: missing_rank",
    ]
    assert advice["text"]["text"] == "Look at its stack."
    assert actions["elements"][0]["url"] == URL
    assert message["text"].startswith("ALERT job run7")


def test_text_of_a_job_is_plain_in_slack() -> None:
    """SECURITY.md: "In cards of Slack and Teams they are plain text"."""
    message = build_slack_message(make_message(summary=HOSTILE))
    for block in message["blocks"]:
        for part in [block.get("text"), *block.get("fields", ())]:
            assert part is None or part["type"] == "plain_text"
    assert "<!channel>" not in message["text"] and "&lt;!channel&gt;" in message["text"]


def test_long_texts_are_within_the_limits_of_slack() -> None:
    long = "word " * 2000
    message = build_slack_message(make_message(summary=long, advice=long, job="j" * 300))
    for block in message["blocks"]:
        limit = 150 if block["type"] == "header" else 3000
        assert all(len(text) <= limit for text in iter_texts(block))


def test_teams_card_has_verdict_and_facts(service: Service) -> None:
    TeamsWebhook(address=service.url).send_message(make_message())
    (attachment,) = service.requests[0].parse_json()["attachments"]
    card = attachment["content"]
    title, facts, advice = card["body"]
    assert title["text"].startswith("ALERT job run7: rank 1 has not entered all\\_reduce")
    assert {fact["title"]: fact["value"] for fact in facts["facts"]}["Culprit"] == "rank 1"
    assert advice["text"] == "Look at its stack."
    assert card["actions"] == [{"type": "Action.OpenUrl", "title": "Open the incident", "url": URL}]


def test_text_of_a_job_makes_no_link_in_teams() -> None:
    """SECURITY.md: "without links and mentions"."""
    (attachment,) = build_teams_message(make_message(summary=HOSTILE))["attachments"]
    title = attachment["content"]["body"][0]["text"]
    assert "](http" not in title and "\\[click\\]\\(http" in title


def test_slack_webhook(service: Service) -> None:
    SlackWebhook(address=service.url).send_message(make_message())
    (request,) = service.requests
    assert request.parse_json() == build_slack_message(make_message())


def test_later_messages_are_in_the_thread_of_the_first(service: Service) -> None:
    bot = SlackBot(address="slack://", token="xoxb-secret", channel="#alerts", api_url=service.url)
    later = MOMENT + timedelta(hours=1)
    other = make_message(id="01J00000000000000000000001")
    for message in (make_message(), make_message("reminder-1", later), other):
        bot.send_message(message)
    bot.send_message(make_message(RESOLVED, later))
    opened, reminder, another, resolved = [request.parse_json() for request in service.requests]
    assert service.requests[0].path == "/chat.postMessage"
    assert service.requests[0].headers["authorization"] == "Bearer xoxb-secret"
    assert opened["channel"] == "#alerts" and "thread_ts" not in opened
    assert (reminder["thread_ts"], reminder["reply_broadcast"]) == ("17.1", False)
    assert "thread_ts" not in another
    assert (resolved["thread_ts"], resolved["reply_broadcast"]) == ("17.1", True)


@pytest.mark.parametrize(("error", "final"), [("channel_not_found", True), ("ratelimited", False)])
def test_refusal_of_slack_is_reported(error: str, final: bool) -> None:
    with Service(ok=False, error=error) as service:
        bot = SlackBot(
            address="slack://", token="xoxb-secret", channel="#none", api_url=service.url
        )
        with pytest.raises(AlertChannelError, match=error) as raised:
            bot.send_message(make_message())
    assert raised.value.final is final


def test_pagerduty_has_one_alert_for_an_incident(service: Service) -> None:
    pager = PagerDuty(address=f"pagerduty://{KEY}", api_url=service.url)
    later = MOMENT + timedelta(hours=1)
    for message in (make_message(), make_message("reminder-1", later)):
        pager.send_message(message)
    pager.send_message(make_message(RESOLVED, later))
    assert {request.path for request in service.requests} == {"/v2/enqueue"}
    sent = [request.parse_json() for request in service.requests]
    assert [event["event_action"] for event in sent] == ["trigger", "trigger", "resolve"]
    assert {event["dedup_key"] for event in sent} == {"01J00000000000000000000000"}
    payload = sent[0]["payload"]
    assert (payload["severity"], payload["source"]) == ("critical", "run7")
    assert payload["custom_details"]["line"] == "/u/train.py:41 in load"


def test_opsgenie_closes_its_alert(service: Service) -> None:
    pager = Opsgenie(address=f"opsgenie://{KEY}", api_url=service.url)
    pager.send_message(make_message())
    pager.send_message(make_message(RESOLVED, MOMENT + timedelta(hours=1)))
    opened, closed = service.requests
    assert opened.headers["authorization"] == f"GenieKey {KEY}"
    assert opened.parse_json()["alias"] == "01J00000000000000000000000"
    assert len(opened.parse_json()["message"]) <= 130
    assert closed.path == "/v2/alerts/01J00000000000000000000000/close?identifierType=alias"


def test_test_message_has_the_lowest_priority(service: Service) -> None:
    message = replace(make_message(), event="test", body={"id": "test", "url": URL})
    PagerDuty(address=f"pagerduty://{KEY}", api_url=service.url).send_message(message)
    Opsgenie(address=f"opsgenie://{KEY}", api_url=service.url).send_message(message)
    duty, genie = [request.parse_json() for request in service.requests]
    assert (duty["payload"]["severity"], genie["priority"]) == ("info", "P5")
    assert json.dumps(build_slack_message(message)) and json.dumps(build_teams_message(message))


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        (
            "https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ",
            SlackWebhook,
        ),
        ("slack://xoxb-1234-1234-4ddbc191d40ee098cbaae6f3523ada2d/#general", SlackBot),
        ("https://example.webhook.office.com/webhookb2/a@b/IncomingWebhook/c/d", TeamsWebhook),
        (
            "https://prod-01.westus.logic.azure.com/workflows/a/triggers/manual/paths/invoke",
            TeamsWebhook,
        ),
        (f"pagerduty://{KEY}", PagerDuty),
        (f"opsgenie://{KEY}?region=eu", Opsgenie),
        (f"pagerduty://{KEY}@{KEY}", AppriseService),
    ],
)
def test_channel_by_url(url: str, kind: type) -> None:
    channel = make_channel(url)
    assert isinstance(channel, kind)
    for secret in (KEY, "4ddbc191d40ee098cbaae6f3523ada2d", "TIiajkdnlazkcOXrIdevi7FQ"):
        assert secret not in channel.name and secret not in channel.key
        assert secret not in repr(channel)


def test_region_chooses_the_address() -> None:
    duty = make_channel(f"pagerduty://{KEY}?region=eu")
    assert isinstance(duty, PagerDuty) and ".eu." in duty.api_url
