"""The server's address, as HANGWATCH_URL gives it."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import SplitResult, unquote, urlsplit

from hangwatch.protocol.signatures import Credential

_DEFAULT_PORTS = {"http": 80, "https": 443}


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
            parts = urlsplit(url.strip())
            port = parts.port
        except ValueError as error:
            raise TargetError(
                f"HANGWATCH_URL={hide_credentials(url)!r} is not a URL ({error}): {example}"
            ) from None
        host = parts.hostname or ""
        # As in http.client, which refuses such names much later.
        is_name = bool(host) and host.isprintable() and " " not in host
        if parts.scheme not in _DEFAULT_PORTS or not is_name or port == 0:
            raise TargetError(
                f"HANGWATCH_URL={hide_credentials(url)!r} is not the address of an http or https"
                f" server: {example}"
            )
        bare = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")
        return cls(base_url=bare, token=unquote(parts.password or parts.username or "") or token)

    @property
    def is_https(self) -> bool:
        return self._parts.scheme == "https"

    @property
    def host(self) -> str:
        return self._parts.hostname or ""

    @property
    def port(self) -> int:
        return self._parts.port or _DEFAULT_PORTS[self._parts.scheme]

    @property
    def path(self) -> str:
        """The path prefix, without a trailing slash; usually empty."""
        return self._parts.path

    @property
    def _parts(self) -> SplitResult:
        return urlsplit(self.base_url)

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
