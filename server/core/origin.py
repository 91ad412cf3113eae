"""Where a request comes from: a page of another site must not act through a person's browser, and a
reverse proxy may add a path.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


def is_cross_site(
    method: str, headers: Mapping[str, str], public_url: str | None, *, by_cookie: bool
) -> bool:
    """Whether a request that changes something comes from a page of another site.
    ``public_url`` is the address behind a proxy.

    Browsers say so by themselves; what is no browser says nothing and has no cookie to lend.
    https://words.filippo.io/csrf/
    """
    if method in SAFE_METHODS:
        return False
    if (fetch_site := headers.get("sec-fetch-site")) is not None:
        return fetch_site not in ("same-origin", "none")
    if (origin := headers.get("origin")) is not None:
        return urlsplit(origin).netloc not in {
            headers.get("host"),
            urlsplit(public_url or "").netloc or None,
        }
    return by_cookie


@functools.lru_cache(maxsize=256)
def is_local_name(host: str | None, own_name: str) -> bool:
    """Whether a Host header means this machine. A name that a foreign page made point here does not
    (DNS rebinding).
    """
    name = urlsplit(f"//{host or ''}").hostname or ""
    if name == own_name or name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class PathPrefixMiddleware:
    """ASGI middleware that serves everything under a path prefix, whether or not the proxy in front
    has taken it off.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._prefix:
            return await self._app(scope, receive, send)
        path = scope["path"]
        if path == self._prefix or not path.startswith(self._prefix + "/"):
            path = self._prefix + (path.removeprefix(self._prefix) or "/")

        async def send_with_prefix(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                target = headers.get("location", "")
                if target.startswith("/") and not target.startswith(self._prefix + "/"):
                    headers["location"] = self._prefix + target
            await send(message)

        await self._app(
            {**scope, "path": path, "raw_path": path.encode(), "root_path": self._prefix},
            receive,
            send_with_prefix,
        )
