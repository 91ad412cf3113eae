"""Alert channels, and the messages that they send. There are signed webhooks, commands, Slack, Teams,
PagerDuty and Opsgenie, and every service that apprise supports. Each sends one message or raises an
error that gives the reason.

Slack and Teams get cards, in which everything that the job wrote is plain text, so that it can
neither mention people nor make links: https://docs.slack.dev/reference/block-kit,
https://adaptivecards.io/explorer

In PagerDuty and Opsgenie, an incident is one alert, however many messages there are on it, and is
resolved with it: https://developer.pagerduty.com/docs/events-api-v2-overview,
https://docs.opsgenie.com/docs/alert-api
"""

from __future__ import annotations

import abc
import base64
import hashlib
import hmac
import html
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import httpx

from hangwatch.model.ownership import check_ownership
from hangwatch.report.text import Document, format_site, name_ranks, truncate_end

POST_TIMEOUT_S = 10.0  # the time for the whole request
COMMAND_TIMEOUT_S = 30.0
_SECRET_PREFIX = "whsec_"

_SLACK_API = "https://slack.com/api"
_SLACK_WEBHOOK_HOST = "hooks.slack.com"
_SLACK_BOT = re.compile(r"slack://(?P<token>xox[a-z]-[\w-]+)/(?P<channel>(?:#|%23)?[\w-]+)/?")
_TEAMS_HOSTS = re.compile(
    r"(^|\.)(webhook\.office\.com|logic\.azure\.com|api\.powerplatform\.com)$"
)
_MAX_SLACK_THREADS = 1000
# A retry may overcome these errors.
_SLACK_TRANSIENT_ERRORS = frozenset(
    ["ratelimited", "internal_error", "fatal_error", "service_unavailable", "request_timeout"]
)
# Limits of Slack, in characters.
_MAX_HEADER, _MAX_SECTION, _MAX_FIELD = 150, 2900, 300
_ADAPTIVE_CARD = "application/vnd.microsoft.card.adaptive"
_TITLE_COLOURS = {"resolved": "Good", "test": "Accent"}  # Teams' colours; others are Attention
# Teams renders a part of Markdown, including links.
_TEAMS_ESCAPES = str.maketrans({character: f"\\{character}" for character in "\\`*_[]()#<>"})
_LINK_LABEL = "Open the incident"
_ICONS = {"resolved": "✅", "test": "🧪"}

_PAGERDUTY_URLS = {"us": "https://events.pagerduty.com", "eu": "https://events.eu.pagerduty.com"}
_OPSGENIE_URLS = {"us": "https://api.opsgenie.com", "eu": "https://api.eu.opsgenie.com"}
# A URL with "@" in it is one of apprise's.
_PAGER_URL = re.compile(
    r"(?P<service>pagerduty|opsgenie)://(?P<key>[\w-]{16,})/?(?:\?region=(?P<region>us|eu))?"
)
_MAX_SUMMARY, _MAX_ALERT, _MAX_DESCRIPTION = 1024, 130, 10_000  # characters


class AlertChannelError(Exception):
    """A message was not accepted. ``final``: a retry would fail too."""

    def __init__(self, reason: str, *, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertMessage:
    """One alert. Its ``id`` is the same each time it is sent, so that receivers can drop repeats."""

    id: str
    event: str  # opened, reminder, planned, aborting, aborted, resolved, test
    title: str
    advice: str
    body: Document  # the incident, for programs

    @property
    def url(self) -> str:
        """The page of the incident."""
        return str(self.body["url"])

    @property
    def text(self) -> str:
        """The text after the title."""
        return f"{self.advice}\n{self.url}" if self.advice else self.url

    @property
    def document(self) -> Document:
        """The whole message, for programs."""
        return {"event": self.event, "text": f"{self.title}\n{self.text}", **self.body}

    @property
    def incident_id(self) -> str:
        """The same for all messages on one incident."""
        return str(self.body["id"])

    @property
    def is_test(self) -> bool:
        """Whether it is a test, which must not page anyone."""
        return self.event == "test"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertChannel(abc.ABC):
    """A receiver of alerts. Its ``name`` can be shown to users, as it contains no secret."""

    address: str = field(repr=False)  # the URL or the command in the settings, with any secrets

    @property
    @abc.abstractmethod
    def name(self) -> str: ...

    @property
    def key(self) -> str:
        """The channel's name in the database, which contains no secret."""
        return hashlib.sha256(self.address.encode()).hexdigest()[:16]

    @abc.abstractmethod
    def send_message(self, message: AlertMessage) -> None:
        """Sends one message, in the caller's thread. Raises AlertChannelError."""


def post_content(
    url: str, *, headers: Mapping[str, str] | None = None, **content: Any
) -> httpx.Response:
    """Posts ``json`` or ``content``. Raises AlertChannelError, without the URL, if it is not accepted."""
    try:
        response = httpx.post(
            url, headers=headers, timeout=POST_TIMEOUT_S, verify=url.startswith("https:"), **content
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise AlertChannelError(f"{type(error).__name__}: {error}") from None
    if not response.is_success:
        final = response.is_client_error and response.status_code not in (408, 425, 429)
        raise AlertChannelError(f"it answered {response.status_code}", final=final)
    return response


def make_channel(url: str, secret: str | None = None) -> AlertChannel:
    """The channel for a URL. Raises ValueError, without the URL's secrets, for an invalid one."""
    if not re.match(r"[\w+-]+://\S", url):
        raise ValueError(
            "should be URLs: https://HOST/PATH for a webhook, or one of those at"
            " https://github.com/caronc/apprise/wiki"
        )
    if bot := _SLACK_BOT.fullmatch(url):
        channel = unquote(bot["channel"])
        address = f"slack://{bot['token']}/{channel}"
        return SlackBot(address=address, token=bot["token"], channel=channel)
    if pager := _PAGER_URL.fullmatch(url):
        address = f"{pager['service']}://{pager['key']}"
        region = pager["region"] or "us"
        if pager["service"] == "pagerduty":
            return PagerDuty(address=address, api_url=_PAGERDUTY_URLS[region])
        return Opsgenie(address=address, api_url=_OPSGENIE_URLS[region])
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme == "https" and host == _SLACK_WEBHOOK_HOST:
        return SlackWebhook(address=url)
    if parts.scheme == "https" and _TEAMS_HOSTS.search(host):
        return TeamsWebhook(address=url)
    # Services come before webhooks: some have HTTP URLs, and require their own message format.
    if _load_apprise().Apprise.instantiate(url, suppress_exceptions=True) is not None:
        return AppriseService(address=url)
    scheme = url.partition("://")[0]
    if scheme not in ("http", "https"):
        raise ValueError(
            f"should be URLs that apprise supports, and {scheme}:// is not: see"
            " https://github.com/caronc/apprise/wiki"
        )
    if not host:
        raise ValueError(
            "should be URLs, and one that begins with http:// or https:// names no host"
        )
    return Webhook(address=url, secret=secret)


def resolve_command(line: str) -> list[str]:
    """The path of an alert command's program, and its arguments. Raises ValueError if the command is
    invalid, or if other users could change the program.
    """
    try:
        arguments = shlex.split(line)
    except ValueError as error:
        raise ValueError(f"is not a valid command: {error}") from None
    if not arguments:
        raise ValueError("should begin with a program, and is empty")
    program = shutil.which(arguments[0])
    if program is None:
        raise ValueError(
            f"should begin with an executable program, and {arguments[0]!r} is not one"
        )
    try:
        check_ownership(Path(program))
    except OSError as error:
        raise ValueError(f"should begin with a program of your own or of root: {error}") from None
    return [program, *arguments[1:]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook(AlertChannel):
    """A POST of JSON. With a secret, it is signed as https://www.standardwebhooks.com specifies: a
    secret that begins with ``whsec_`` is base64, any other is used unchanged.
    """

    secret: str | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        parts = urlsplit(self.address)  # the path and the user info are secrets of many services
        address = f"{parts.scheme}://{parts.hostname}"
        return f"{address}:{parts.port}" if parts.port else address

    def send_message(self, message: AlertMessage) -> None:
        content = json.dumps(message.document).encode()
        headers = {
            "Content-Type": "application/json",
            "Webhook-Id": message.id,
            "Webhook-Timestamp": str(int(time.time())),
        }
        if self.secret is not None:
            key = self.secret.encode()
            if self.secret.startswith(_SECRET_PREFIX):
                key = base64.b64decode(self.secret.removeprefix(_SECRET_PREFIX))
            signed = f"{message.id}.{headers['Webhook-Timestamp']}.".encode() + content
            digest = hmac.digest(key, signed, "sha256")
            headers["Webhook-Signature"] = "v1," + base64.b64encode(digest).decode()
        post_content(self.address, headers=headers, content=content)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppriseService(AlertChannel):
    """A service that apprise supports, by its URL: e-mail, Telegram, DingTalk and many others."""

    @property
    def name(self) -> str:
        service = _load_apprise().Apprise.instantiate(self.address)
        safe_url = service.url(privacy=True) if service else ""
        return str(safe_url).partition("?")[0] or "an alert service"

    def send_message(self, message: AlertMessage) -> None:
        apprise = _load_apprise()
        kind = apprise.NotifyType.FAILURE
        if message.event == "resolved":
            has_ended = message.body.get("resolution") in ("ended", "aborted")
            kind = apprise.NotifyType.INFO if has_ended else apprise.NotifyType.SUCCESS
        service = apprise.Apprise()
        service.add(self.address)
        with apprise.LogCapture(level=logging.WARNING) as captured_log:
            done = service.notify(title=message.title, body=message.text, notify_type=kind)
            reason = captured_log.getvalue().strip() if captured_log else ""
        if not done:
            raise AlertChannelError((reason or "the service did not accept it").splitlines()[-1])


def _load_apprise() -> Any:
    """Imports apprise when it is first used, because that is slow. Its log is discarded, because it
    contains whole URLs; our own errors report what failed.
    """
    import apprise

    log = logging.getLogger("apprise")
    log.propagate = False
    if not log.handlers:
        log.addHandler(logging.NullHandler())
    return apprise


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandChannel(AlertChannel):
    """A program of the operator, which gets JSON on stdin and the text in HANGWATCH_TEXT."""

    timeout_s: float = COMMAND_TIMEOUT_S

    @property
    def name(self) -> str:
        return f"command {shlex.split(self.address)[0]}"

    def send_message(self, message: AlertMessage) -> None:
        # Settings of this server, including the token, may be in the environment. They are not
        # passed on.
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("HANGWATCH_")
        }
        environment |= {
            "HANGWATCH_EVENT": message.event,
            "HANGWATCH_TITLE": message.title,
            "HANGWATCH_TEXT": message.text,
        }
        try:
            done = subprocess.run(
                resolve_command(self.address),
                input=json.dumps(message.document),
                env=environment,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self.timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise AlertChannelError(f"it ran longer than {self.timeout_s:g} s") from None
        except ValueError as error:  # the program has been removed or changed
            raise AlertChannelError(f"its command {error}") from None
        except OSError as error:
            raise AlertChannelError(f"it cannot be run: {error.strerror}") from None
        if done.returncode:
            problem = f"it ended with status {done.returncode}"
            if lines := done.stderr.strip().splitlines():
                problem = f"{problem}: {lines[-1][:200]}"
            raise AlertChannelError(problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlackWebhook(AlertChannel):
    """An incoming webhook of Slack: https://hooks.slack.com/services/T/B/X."""

    name = "Slack"

    def send_message(self, message: AlertMessage) -> None:
        post_content(self.address, json=build_slack_message(message))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlackBot(AlertChannel):
    """A bot with the right chat:write: slack://xoxb-TOKEN/CHANNEL.

    Later messages on an incident are in the thread of the first one. Threads are remembered while
    the server runs: after a restart, the next message on an incident begins a new one.
    """

    token: str = field(repr=False)
    channel: str
    api_url: str = _SLACK_API
    # The time stamp of an incident's first message, which identifies its thread, by incident.
    _threads: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"Slack {self.channel}"

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
            raise AlertChannelError(
                f"it answered {error}", final=error not in _SLACK_TRANSIENT_ERRORS
            )
        if thread is None and answer.get("ts"):
            self._threads[message.incident_id] = str(answer["ts"])
            if len(self._threads) > _MAX_SLACK_THREADS:
                del self._threads[next(iter(self._threads))]


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamsWebhook(AlertChannel):
    """A webhook or workflow of Microsoft Teams."""

    name = "Teams"

    def send_message(self, message: AlertMessage) -> None:
        post_content(self.address, json=build_teams_message(message))


@dataclass(frozen=True, slots=True, kw_only=True)
class PagerDuty(AlertChannel):
    """A service with an Events API v2 integration: pagerduty://INTEGRATION_KEY[?region=eu]."""

    name = "PagerDuty"
    api_url: str = _PAGERDUTY_URLS["us"]

    def send_message(self, message: AlertMessage) -> None:
        content = {
            "routing_key": self.address.removeprefix("pagerduty://"),
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
            "links": [{"href": message.url, "text": _LINK_LABEL}],
        }
        post_content(f"{self.api_url}/v2/enqueue", json=content)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opsgenie(AlertChannel):
    """An API integration: opsgenie://API_KEY[?region=eu]."""

    name = "Opsgenie"
    api_url: str = _OPSGENIE_URLS["us"]

    def send_message(self, message: AlertMessage) -> None:
        headers = {"Authorization": f"GenieKey {self.address.removeprefix('opsgenie://')}"}
        alias = message.incident_id
        if message.event == "resolved":
            path = f"/v2/alerts/{quote(alias, safe='')}/close?identifierType=alias"
            content: Document = {"source": "hangwatch", "note": message.title}
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


def build_slack_message(message: AlertMessage) -> Document:
    """A message with the verdict, culprit, line and a link. Notifications show its ``text``."""
    label, _, sentence = message.title.partition(" job ")
    header = _make_plain_text(f"{_ICONS.get(message.event, '🛑')} {label}", _MAX_HEADER)
    blocks: list[Document] = [
        {"type": "header", "text": header},
        {"type": "section", "text": _make_plain_text(f"job {sentence}", _MAX_SECTION)},
    ]
    fields = [_make_plain_text(f"{name}: {v}", _MAX_FIELD) for name, v in _iter_facts(message)]
    if fields:
        blocks.append({"type": "section", "fields": fields})
    if message.advice:
        blocks.append({"type": "section", "text": _make_plain_text(message.advice, _MAX_SECTION)})
    button = {"type": "button", "text": _make_plain_text(_LINK_LABEL, 75), "url": message.url}
    blocks.append({"type": "actions", "elements": [button]})
    text = html.escape(message.title, quote=False)
    return {"text": truncate_end(text, _MAX_SECTION), "blocks": blocks}


def _make_plain_text(text: str, limit: int) -> Document:
    return {"type": "plain_text", "text": truncate_end(text, limit) or "-", "emoji": False}


def build_teams_message(message: AlertMessage) -> Document:
    """A card for an incoming webhook, or for a workflow that posts what it receives."""
    colour = _TITLE_COLOURS.get(message.event, "Attention")
    body = [_make_text_block(message.title, weight="Bolder", size="Medium", color=colour)]
    facts = [
        {"title": name, "value": value.translate(_TEAMS_ESCAPES)}
        for name, value in _iter_facts(message)
    ]
    if facts:
        body.append({"type": "FactSet", "facts": facts})
    if message.advice:
        body.append(_make_text_block(message.advice))
    card = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "msteams": {"width": "Full"},
        "body": body,
        "actions": [{"type": "Action.OpenUrl", "title": _LINK_LABEL, "url": message.url}],
    }
    attachment = {"contentType": _ADAPTIVE_CARD, "contentUrl": None, "content": card}
    return {"type": "message", "attachments": [attachment]}


def _make_text_block(text: str, **style: str) -> Document:
    return {"type": "TextBlock", "text": text.translate(_TEAMS_ESCAPES), "wrap": True, **style}


def _iter_facts(message: AlertMessage) -> Iterator[tuple[str, str]]:
    body = message.body
    if body.get("culprits"):
        yield "Culprit", truncate_end(name_ranks(body["culprits"]), _MAX_FIELD - 20)
    if body.get("waiting"):
        count = len(body["waiting"])
        yield "Waiting", f"{count} rank{'' if count == 1 else 's'}"
    if body.get("site"):
        yield "Line", format_site(body["site"])
    if body.get("kind"):
        yield "Kind", str(body["kind"])
