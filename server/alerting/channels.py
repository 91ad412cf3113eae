"""Ways to reach people: a signed webhook, any service that apprise knows, a command. Each sends one
message or says why it cannot.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx

WEBHOOK_TIMEOUT_S = 10.0  # seconds for a webhook's answer
COMMAND_TIMEOUT_S = 30.0
_SECRET_PREFIX = "whsec_"


class ChannelError(Exception):
    """A message was not taken. ``final``: the same again would fare the same."""

    def __init__(self, reason: str, *, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertMessage:
    """What people are told. ``id`` is the same however often it is sent, so that a receiver can
    drop a repetition.
    """

    id: str
    event: str  # opened, reminder, planned, aborting, aborted, resolved, test
    title: str
    text: str
    body: dict[str, Any]  # the incident, for programs


class Channel(Protocol):
    """``name`` can be shown: it holds no secret. ``key`` tells channels apart in the store, and
    holds none either.
    """

    @property
    def name(self) -> str: ...

    @property
    def key(self) -> str: ...

    def send_message(self, message: AlertMessage) -> None:
        """Sends one message, in the caller's thread. Raises ChannelError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """A POST of JSON, signed as https://www.standardwebhooks.com says where there is a secret."""

    url: str = field(repr=False)
    secret: str | None = field(default=None, repr=False)
    timeout_s: float = WEBHOOK_TIMEOUT_S
    wall_clock: Callable[[], float] = time.time

    @property
    def name(self) -> str:
        parts = urlsplit(self.url)  # path and user information are secrets of many services
        return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")

    @property
    def key(self) -> str:
        return _derive_key(self.url)

    def send_message(self, message: AlertMessage) -> None:
        content = json.dumps(
            {"event": message.event, "text": f"{message.title}\n{message.text}", **message.body}
        ).encode()
        headers = {
            "Content-Type": "application/json",
            "Webhook-Id": message.id,
            "Webhook-Timestamp": str(int(self.wall_clock())),
        }
        if self.secret is not None:
            headers["Webhook-Signature"] = sign_webhook(
                self.secret, message.id, headers["Webhook-Timestamp"], content
            )
        try:
            answer = httpx.post(
                self.url,
                content=content,
                headers=headers,
                timeout=self.timeout_s,
                verify=self.url.startswith("https:"),
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ChannelError(f"{type(error).__name__}: {error}") from None
        if not answer.is_success:
            final = answer.is_client_error and answer.status_code not in (408, 425, 429)
            raise ChannelError(f"it answered {answer.status_code}", final=final)


def sign_webhook(secret: str, id: str, timestamp: str, content: bytes) -> str:
    """The Standard Webhooks signature; a secret that does not begin with ``whsec_`` is used as it
    is, not as base64.
    """
    key = (
        base64.b64decode(secret.removeprefix(_SECRET_PREFIX))
        if secret.startswith(_SECRET_PREFIX)
        else secret.encode()
    )
    digest = hmac.new(
        key, b".".join((id.encode(), timestamp.encode(), content)), hashlib.sha256
    ).digest()
    return "v1," + base64.b64encode(digest).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class AppriseService:
    """One of apprise's: Slack, Teams, PagerDuty, e-mail, Telegram, DingTalk, Feishu, WeCom and
    others, each by its URL.
    """

    url: str = field(repr=False)

    @property
    def name(self) -> str:
        service = _load_apprise().Apprise.instantiate(self.url)
        safe_url = service.url(privacy=True) if service else ""
        return str(safe_url).partition("?")[0] or "an alert service"

    @property
    def key(self) -> str:
        return _derive_key(self.url)

    def send_message(self, message: AlertMessage) -> None:
        apprise = _load_apprise()
        resolved_type = (
            apprise.NotifyType.INFO
            if message.body.get("resolution") in ("ended", "aborted")
            else apprise.NotifyType.SUCCESS
        )
        kind = resolved_type if message.event == "resolved" else apprise.NotifyType.FAILURE
        service = apprise.Apprise()
        service.add(self.url)
        with apprise.LogCapture(level=logging.WARNING) as captured_log:
            done = service.notify(title=message.title, body=message.text, notify_type=kind)
            reason = captured_log.getvalue().strip() if captured_log else ""
        if not done:
            raise ChannelError(reason.splitlines()[-1] if reason else "the service did not take it")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandChannel:
    """A program of the operator's own: the message as JSON on its stdin, the text in
    HANGWATCH_TEXT.
    """

    command_line: str = field(repr=False)
    timeout_s: float = COMMAND_TIMEOUT_S

    @property
    def name(self) -> str:
        return f"command {shlex.split(self.command_line)[0]}"

    @property
    def key(self) -> str:
        return _derive_key(self.command_line)

    def send_message(self, message: AlertMessage) -> None:
        payload = json.dumps(
            {"event": message.event, "text": f"{message.title}\n{message.text}", **message.body}
        )
        # Nothing of ours that is secret: the settings, the token among them, may be in the
        # environment.
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("HANGWATCH_")
        }
        event_variables = {
            "HANGWATCH_EVENT": message.event,
            "HANGWATCH_TITLE": message.title,
            "HANGWATCH_TEXT": message.text,
        }
        try:
            done = subprocess.run(
                shlex.split(self.command_line), input=payload, env={**inherited, **event_variables}, capture_output=True, text=True, errors="replace",
                timeout=self.timeout_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise ChannelError(f"it ran longer than {self.timeout_s:g} s") from None
        except OSError as error:
            raise ChannelError(f"it cannot be run: {error.strerror}") from None
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:]
            raise ChannelError(
                f"it ended with status {done.returncode}" + (f": {last[0][:200]}" if last else "")
            )


def make_channels(urls: Sequence[str], secret: str | None, command: str | None) -> list[Channel]:
    """A channel for each setting."""
    channels: list[Channel] = [
        Webhook(url=u, secret=secret) if _is_webhook(u) else AppriseService(url=u) for u in urls
    ]
    if command is not None:
        channels.append(CommandChannel(command_line=command))
    return channels


def find_url_problem(url: str) -> str | None:
    """What is wrong with an alert URL, without its secrets."""
    scheme = url.partition("://")[0]
    if not re.match(r"[\w+-]+://\S", url):
        return (
            "should be URLs: https://HOST/PATH for a webhook, or one of those at"
            " https://github.com/caronc/apprise/wiki"
        )
    if scheme in ("http", "https"):
        return (
            None
            if urlsplit(url).hostname
            else "should be URLs, and one that begins with http:// or https:// names no host"
        )
    if not _is_known_service(url):
        return (
            f"should be URLs that apprise knows, and a {scheme}:// one is not: see"
            " https://github.com/caronc/apprise/wiki"
        )
    return None


def find_command_problem(line: str) -> str | None:
    """What is wrong with an alert command."""
    try:
        arguments = shlex.split(line)
    except ValueError as error:
        return f"is no command: {error}"
    if not arguments or shutil.which(arguments[0]) is None:
        return (
            f"should begin with a program that can be run, and {arguments[0] if arguments else 'nothing'!r}"
            " is none"
        )
    return None


def _is_webhook(url: str) -> bool:
    """Anything over HTTP, but for the addresses that chat services hand out, which want a form of
    their own.
    """
    return urlsplit(url).scheme in ("http", "https") and not _is_known_service(url)


def _load_apprise() -> Any:
    """The library, which takes a moment to load and puts whole URLs into its log: what failed is
    ours to say.
    """
    import apprise

    log = logging.getLogger("apprise")
    log.propagate = False
    if not log.handlers:
        log.addHandler(logging.NullHandler())
    return apprise


def _is_known_service(url: str) -> bool:
    return _load_apprise().Apprise.instantiate(url, suppress_exceptions=True) is not None


def _derive_key(address: str) -> str:
    return hashlib.sha256(address.encode()).hexdigest()[:16]
