"""Channels to PagerDuty and Opsgenie. One incident is one alert there, however many messages there are on it, and
is resolved with it.

https://developer.pagerduty.com/docs/events-api-v2-overview, https://docs.opsgenie.com/docs/alert-api
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from hangwatch.report.sites import format_site
from hangwatch.report.text import name_ranks, truncate_end

from .message import AlertMessage, Channel, post_content

_PAGERDUTY_URLS = {"us": "https://events.pagerduty.com", "eu": "https://events.eu.pagerduty.com"}
_OPSGENIE_URLS = {"us": "https://api.opsgenie.com", "eu": "https://api.eu.opsgenie.com"}
# With "@" in it, the URL is one of apprise's.
_PAGER_URL = re.compile(
    r"(?P<service>pagerduty|opsgenie)://(?P<key>[\w-]{16,})/?(?:\?region=(?P<region>us|eu))?"
)
_MAX_SUMMARY, _MAX_ALERT, _MAX_DESCRIPTION = 1024, 130, 10_000  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class PagerDuty(Channel):
    """A service with an Events API v2 integration: pagerduty://INTEGRATION_KEY[?region=eu]."""

    name = "PagerDuty"
    routing_key: str = field(repr=False)
    api_url: str = _PAGERDUTY_URLS["us"]

    @property
    def address(self) -> str:
        return f"pagerduty://{self.routing_key}"

    def send_message(self, message: AlertMessage) -> None:
        content = {
            "routing_key": self.routing_key,
            "event_action": "resolve" if message.event == "resolved" else "trigger",
            "dedup_key": message.incident_id,
            "client": "hangwatch",
            "client_url": message.url,
            "payload": {
                "summary": truncate_end(message.title, _MAX_SUMMARY),
                "source": str(message.body.get("job", "hangwatch")),
                "severity": "info" if message.is_test else "critical",
                "class": str(message.body.get("kind", message.event)),
                "custom_details": _make_details(message),
            },
            "links": [{"href": message.url, "text": "Open the incident"}],
        }
        post_content(f"{self.api_url}/v2/enqueue", json=content)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opsgenie(Channel):
    """An API integration: opsgenie://API_KEY[?region=eu]."""

    name = "Opsgenie"
    api_key: str = field(repr=False)
    api_url: str = _OPSGENIE_URLS["us"]

    @property
    def address(self) -> str:
        return f"opsgenie://{self.api_key}"

    def send_message(self, message: AlertMessage) -> None:
        headers = {"Authorization": f"GenieKey {self.api_key}"}
        alias = message.incident_id
        if message.event == "resolved":
            path = f"/v2/alerts/{quote(alias, safe='')}/close?identifierType=alias"
            content: dict[str, Any] = {"source": "hangwatch", "note": message.title}
        else:
            path = "/v2/alerts"
            content = {
                "message": truncate_end(message.title, _MAX_ALERT),
                "alias": alias,
                "description": truncate_end(f"{message.title}\n{message.text}", _MAX_DESCRIPTION),
                "details": _make_details(message),
                "source": "hangwatch",
                "entity": str(message.body.get("job", "")),
                "priority": "P5" if message.is_test else "P1",
            }
        post_content(f"{self.api_url}{path}", headers=headers, json=content)


def _make_details(message: AlertMessage) -> dict[str, str]:
    body = message.body
    details = {"advice": message.text, "url": message.url}
    if body.get("culprits"):
        details["culprits"] = truncate_end(name_ranks(body["culprits"]), 300)
    if body.get("site"):
        details["line"] = format_site(body["site"])
    return details


def make_pager_channel(url: str) -> Channel | None:
    """The channel for a URL of PagerDuty or Opsgenie; None if it is another one."""
    found = _PAGER_URL.fullmatch(url)
    if found is None:
        return None
    region = found["region"] or "us"
    if found["service"] == "pagerduty":
        return PagerDuty(routing_key=found["key"], api_url=_PAGERDUTY_URLS[region])
    return Opsgenie(api_key=found["key"], api_url=_OPSGENIE_URLS[region])
