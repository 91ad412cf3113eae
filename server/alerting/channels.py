"""The channel for each setting: a signed webhook, a command, a service of our own (`chat`, `pagers`), or
any that apprise supports. Each sends one message or raises an error that gives the reason.
"""

from __future__ import annotations

import base64
import hmac
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from .chat import make_chat_channel
from .message import AlertMessage, Channel, ChannelError, post_content
from .pagers import make_pager_channel

COMMAND_TIMEOUT_S = 30.0
_SECRET_PREFIX = "whsec_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook(Channel):
    """A POST of JSON. With a secret, it is signed as https://www.standardwebhooks.com specifies."""

    address: str = field(repr=False)
    secret: str | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        parts = urlsplit(self.address)  # for many services, path and user info are secrets
        return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")

    def send_message(self, message: AlertMessage) -> None:
        content = json.dumps(message.document).encode()
        headers = {
            "Content-Type": "application/json",
            "Webhook-Id": message.id,
            "Webhook-Timestamp": str(int(time.time())),
        }
        if self.secret is not None:
            headers["Webhook-Signature"] = sign_webhook(
                self.secret, message.id, headers["Webhook-Timestamp"], content
            )
        post_content(self.address, headers=headers, content=content)


def sign_webhook(secret: str, id: str, timestamp: str, content: bytes) -> str:
    """The Standard Webhooks signature. A secret that begins with ``whsec_`` is base64; any other is
    used unchanged.
    """
    key = secret.encode()
    if secret.startswith(_SECRET_PREFIX):
        key = base64.b64decode(secret.removeprefix(_SECRET_PREFIX))
    digest = hmac.digest(key, f"{id}.{timestamp}.".encode() + content, "sha256")
    return "v1," + base64.b64encode(digest).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class AppriseService(Channel):
    """A service that apprise supports, given by its URL: Slack, Teams, PagerDuty, e-mail, Telegram,
    DingTalk, Feishu, WeCom and others.
    """

    address: str = field(repr=False)

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
            raise ChannelError((reason or "the service did not accept it").splitlines()[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandChannel(Channel):
    """A program of the operator. It gets the message as JSON on stdin and the text in
    HANGWATCH_TEXT.
    """

    address: str = field(repr=False)  # its command line
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
                shlex.split(self.address), input=json.dumps(message.document), env=environment, capture_output=True, text=True, errors="replace",
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
    """A channel for each setting. Raises ValueError for a URL that `make_channel` refuses."""
    channels = [make_channel(url, secret) for url in urls]
    if command is not None:
        channels.append(CommandChannel(address=command))
    return channels


def make_channel(url: str, secret: str | None = None) -> Channel:
    """The channel for a URL. Raises ValueError, without the URL's secrets, if it is invalid."""
    if not re.match(r"[\w+-]+://\S", url):
        raise ValueError(
            "should be URLs: https://HOST/PATH for a webhook, or one of those at"
            " https://github.com/caronc/apprise/wiki"
        )
    if channel := make_chat_channel(url) or make_pager_channel(url):
        return channel
    # Before webhooks: some services have HTTP URLs, and require their own message format.
    if _load_apprise().Apprise.instantiate(url, suppress_exceptions=True) is not None:
        return AppriseService(address=url)
    scheme = url.partition("://")[0]
    if scheme not in ("http", "https"):
        raise ValueError(
            f"should be URLs that apprise supports, and {scheme}:// is not: see"
            " https://github.com/caronc/apprise/wiki"
        )
    if not urlsplit(url).hostname:
        raise ValueError(
            "should be URLs, and one that begins with http:// or https:// names no host"
        )
    return Webhook(address=url, secret=secret)


def check_command(line: str) -> None:
    """Raises ValueError if an alert command is invalid."""
    try:
        arguments = shlex.split(line)
    except ValueError as error:
        raise ValueError(f"is not a valid command: {error}") from None
    if not arguments:
        raise ValueError("should begin with a program, and is empty")
    if shutil.which(arguments[0]) is None:
        raise ValueError(
            f"should begin with an executable program, and {arguments[0]!r} is not one"
        )


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
