"""What a channel is and sends, and how it posts JSON."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

POST_TIMEOUT_S = 10.0  # for the whole request


class ChannelError(Exception):
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
    text: str
    body: dict[str, Any]  # the incident, for programs

    @property
    def incident_id(self) -> str:
        """The same for all messages on one incident."""
        return str(self.body.get("id", self.id))

    @property
    def is_test(self) -> bool:
        """It must not page anyone."""
        return self.event == "test"

    @property
    def url(self) -> str:
        return str(self.body.get("url", ""))


class Channel(Protocol):
    """``name`` can be shown to users. ``key`` identifies the channel in the database. Neither
    contains a secret.
    """

    @property
    def name(self) -> str: ...

    @property
    def key(self) -> str: ...

    def send_message(self, message: AlertMessage) -> None:
        """Sends one message, in the caller's thread. Raises ChannelError."""


def derive_key(address: str) -> str:
    return hashlib.sha256(address.encode()).hexdigest()[:16]


def post_content(
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = POST_TIMEOUT_S,
    **content: Any,
) -> httpx.Response:
    """Posts ``json`` or ``content``. Raises ChannelError, without the URL, if it is not accepted."""
    try:
        response = httpx.post(
            url,
            headers=dict(headers or {}),
            timeout=timeout_s,
            verify=url.startswith("https:"),
            **content,
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ChannelError(f"{type(error).__name__}: {error}") from None
    if not response.is_success:
        final = response.is_client_error and response.status_code not in (408, 425, 429)
        raise ChannelError(f"it answered {response.status_code}", final=final)
    return response
