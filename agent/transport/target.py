"""The server's address, as HANGWATCH_URL gives it."""

from __future__ import annotations

from dataclasses import dataclass, field

import httpx

from hangwatch.protocol.signatures import Credential


class TargetError(ValueError):
    """HANGWATCH_URL is not the URL of a server. The message has an example."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTarget:
    """The server's address. ``base_url`` has no credentials and no trailing slash, and keeps a path
    prefix.
    """

    base_url: str
    token: str = field(default="", repr=False)

    @classmethod
    def from_url(cls, url: str, token: str = "") -> ServerTarget:
        """A token in the URL (``http://:TOKEN@host``) takes precedence over ``token``. Raises
        TargetError.
        """
        example = "an example is http://:TOKEN@master:8642"
        try:
            parsed = httpx.URL(url.strip())
        except (httpx.InvalidURL, ValueError) as error:
            raise TargetError(
                f"HANGWATCH_URL={hide_credentials(url)!r} is not a URL ({error}): {example}"
            ) from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise TargetError(
                f"HANGWATCH_URL={hide_credentials(url)!r} is not the address of an http or https"
                f" server: {example}"
            )
        bare = parsed.copy_with(username=None, password=None, query=None, fragment=None)
        return cls(
            base_url=str(bare).rstrip("/"), token=parsed.password or parsed.username or token
        )

    @property
    def auth_headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    @property
    def credential(self) -> Credential | None:
        """What requests are signed with, so that the token itself is not sent."""
        return Credential.from_token(self.token) if self.token else None

    def __str__(self) -> str:
        return self.base_url


def hide_credentials(url: str) -> str:
    """The URL without a token: it is shown in messages, which end in logs."""
    scheme, slashes, rest = url.rpartition("//")
    return scheme + slashes + rest.rpartition("@")[2]
