"""An alert channel: its interface, the messages that it sends, and how it posts JSON."""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

POST_TIMEOUT_S = 10.0  # the time for the whole request


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
    body: dict[str, Any]  # the incident, for programs

    @property
    def url(self) -> str:
        """The page of the incident."""
        return str(self.body["url"])

    @property
    def text(self) -> str:
        """The text after the title."""
        return f"{self.advice}\n{self.url}" if self.advice else self.url

    @property
    def document(self) -> dict[str, Any]:
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
class Delivery:
    """An alert that a channel has not accepted yet, as the database keeps it."""

    incident: str
    event: str
    channel: str  # the channel's key


class AlertChannel(abc.ABC):
    """A receiver of alerts. Its ``name`` can be shown to users, as it contains no secret."""

    __slots__ = ()

    @property
    @abc.abstractmethod
    def name(self) -> str: ...

    @property
    @abc.abstractmethod
    def address(self) -> str:
        """The URL or the command in the settings, which may contain secrets."""

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
