"""Channels to Slack and Teams, with cards. With a bot's token, Slack shows later messages on an incident
in the thread of the first one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from .cards import build_slack_message, build_teams_message
from .message import AlertMessage, Channel, ChannelError, post_content

_SLACK_API = "https://slack.com/api"
_SLACK_WEBHOOK_HOST = "hooks.slack.com"
_SLACK_BOT = re.compile(r"slack://(?P<token>xox[a-z]-[\w-]+)/(?P<channel>(?:#|%23)?[\w-]+)/?")
_TEAMS_HOSTS = re.compile(
    r"(^|\.)(webhook\.office\.com|logic\.azure\.com|api\.powerplatform\.com)$"
)
_MAX_THREADS = 1000
# Errors of Slack that a retry may overcome.
_TRANSIENT_ERRORS = frozenset(
    ["ratelimited", "internal_error", "fatal_error", "service_unavailable", "request_timeout"]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlackWebhook(Channel):
    """An incoming webhook of Slack: https://hooks.slack.com/services/T/B/X."""

    name = "Slack"
    address: str = field(repr=False)

    def send_message(self, message: AlertMessage) -> None:
        post_content(self.address, json=build_slack_message(message))


@dataclass(slots=True, kw_only=True)
class SlackBot(Channel):
    """A bot with the right chat:write: slack://xoxb-TOKEN/CHANNEL.

    Threads are remembered while the server runs: after a restart, the next message on an incident
    begins a new one.
    """

    token: str = field(repr=False)
    channel: str
    api_url: str = _SLACK_API
    # By incident: the time stamp of its first message, which identifies its thread.
    _threads: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"Slack {self.channel}"

    @property
    def address(self) -> str:
        return f"slack://{self.token}/{self.channel}"

    def send_message(self, message: AlertMessage) -> None:
        content: dict[str, Any] = {"channel": self.channel, **build_slack_message(message)}
        thread = self._threads.get(message.incident_id)
        if thread is not None:
            # The end of a hang is also shown in the channel itself.
            content |= {"thread_ts": thread, "reply_broadcast": message.event == "resolved"}
        response = post_content(
            f"{self.api_url}/chat.postMessage",
            headers={"Authorization": f"Bearer {self.token}"},
            json=content,
        )
        answer = response.json()
        if not answer.get("ok"):
            error = str(answer.get("error", "no reason given"))
            raise ChannelError(f"it answered {error}", final=error not in _TRANSIENT_ERRORS)
        if thread is None and answer.get("ts"):
            self._threads[message.incident_id] = str(answer["ts"])
            if len(self._threads) > _MAX_THREADS:
                del self._threads[next(iter(self._threads))]


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamsWebhook(Channel):
    """A webhook or workflow of Microsoft Teams."""

    name = "Teams"
    address: str = field(repr=False)

    def send_message(self, message: AlertMessage) -> None:
        post_content(self.address, json=build_teams_message(message))


def make_chat_channel(url: str) -> Channel | None:
    """The channel for a URL of Slack or Teams; None if it is another one."""
    if bot := _SLACK_BOT.fullmatch(url):
        return SlackBot(token=bot["token"], channel=unquote(bot["channel"]))
    parts = urlsplit(url)
    if parts.scheme != "https":
        return None
    host = parts.hostname or ""
    if host == _SLACK_WEBHOOK_HOST:
        return SlackWebhook(address=url)
    return TeamsWebhook(address=url) if _TEAMS_HOSTS.search(host) else None
