"""The channel for each setting: a signed webhook, a command, a service of our own (`chat`, `pagers`), or
any that apprise supports. Each sends one message or raises an error that gives the reason.
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
from typing import Any
from urllib.parse import urlsplit

from .chat import make_chat_channel
from .message import POST_TIMEOUT_S, AlertMessage, Channel, ChannelError, derive_key, post_content
from .pagers import make_pager_channel

COMMAND_TIMEOUT_S = 30.0
_SECRET_PREFIX = "whsec_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """A POST of JSON. With a secret, it is signed as https://www.standardwebhooks.com specifies."""

    url: str = field(repr=False)
    secret: str | None = field(default=None, repr=False)
    timeout_s: float = POST_TIMEOUT_S
    wall_clock: Callable[[], float] = time.time

    @property
    def name(self) -> str:
        parts = urlsplit(self.url)  # for many services, path and user info are secrets
        return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")

    @property
    def key(self) -> str:
        return derive_key(self.url)

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
        post_content(self.url, headers=headers, timeout_s=self.timeout_s, content=content)


def sign_webhook(secret: str, id: str, timestamp: str, content: bytes) -> str:
    """The Standard Webhooks signature. A secret that begins with ``whsec_`` is base64; any other is
    used unchanged.
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
    """A service that apprise supports, given by its URL: Slack, Teams, PagerDuty, e-mail, Telegram,
    DingTalk, Feishu, WeCom and others.
    """

    url: str = field(repr=False)

    @property
    def name(self) -> str:
        service = _load_apprise().Apprise.instantiate(self.url)
        safe_url = service.url(privacy=True) if service else ""
        return str(safe_url).partition("?")[0] or "an alert service"

    @property
    def key(self) -> str:
        return derive_key(self.url)

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
            raise ChannelError(
                reason.splitlines()[-1] if reason else "the service did not accept it"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandChannel:
    """A program of the operator. It gets the message as JSON on stdin and the text in
    HANGWATCH_TEXT.
    """

    command_line: str = field(repr=False)
    timeout_s: float = COMMAND_TIMEOUT_S

    @property
    def name(self) -> str:
        return f"command {shlex.split(self.command_line)[0]}"

    @property
    def key(self) -> str:
        return derive_key(self.command_line)

    def send_message(self, message: AlertMessage) -> None:
        payload = json.dumps(
            {"event": message.event, "text": f"{message.title}\n{message.text}", **message.body}
        )
        # Settings of this server, including the token, may be in the environment. They are not
        # passed on.
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
    channels = [_make_channel(url, secret) for url in urls]
    if command is not None:
        channels.append(CommandChannel(command_line=command))
    return channels


def _make_channel(url: str, secret: str | None) -> Channel:
    native = make_chat_channel(url) or make_pager_channel(url)
    if native is not None:
        return native
    return Webhook(url=url, secret=secret) if _is_webhook(url) else AppriseService(url=url)


def find_url_problem(url: str) -> str | None:
    """Why an alert URL is invalid, without its secrets; None if it is valid."""
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
    if make_chat_channel(url) or make_pager_channel(url):
        return None
    if not _is_known_service(url):
        return (
            f"should be URLs that apprise supports, and {scheme}:// is not: see"
            " https://github.com/caronc/apprise/wiki"
        )
    return None


def find_command_problem(line: str) -> str | None:
    """Why an alert command is invalid; None if it is valid."""
    try:
        arguments = shlex.split(line)
    except ValueError as error:
        return f"is not a valid command: {error}"
    if not arguments:
        return "should begin with a program, and is empty"
    if shutil.which(arguments[0]) is None:
        return f"should begin with an executable program, and {arguments[0]!r} is not one"
    return None


def _is_webhook(url: str) -> bool:
    """Any HTTP URL except those of chat services, which require their own message format."""
    return urlsplit(url).scheme in ("http", "https") and not _is_known_service(url)


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


def _is_known_service(url: str) -> bool:
    return _load_apprise().Apprise.instantiate(url, suppress_exceptions=True) is not None
