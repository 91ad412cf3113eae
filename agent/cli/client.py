"""The server's API, as the command line needs it."""

from __future__ import annotations

import argparse
import contextlib
import email.utils
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

import httpx

from .errors import CliError, NotFoundError, RefusedError, UnreachableError, UsageError

DEFAULT_URL = "http://127.0.0.1:8642"
TIMEOUT_S = 10.0
STREAM_TIMEOUT_S = 30.0  # of a stream: the server says something more often
_MAX_PAGES = 1000  # a server whose list never ends is broken


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """Where the server is. ``url`` has no user information and no slash at its end, so that it can
    be shown.
    """

    url: str
    token: str | None = field(default=None, repr=False)


def parse_address(url: str | None, token: str | None, env: Mapping[str, str]) -> ServerAddress:
    """The server that is meant: the flag, else HANGWATCH_URL, else the default. Raises UsageError
    for what is no URL.

    A token is taken from the flag, else from the URL (``http://:TOKEN@host``), else from
    HANGWATCH_TOKEN.
    """
    told = (url or env.get("HANGWATCH_URL") or DEFAULT_URL).strip()
    shown = told.rpartition("@")[2]
    try:
        parts = urlsplit(told)
        host, port = parts.hostname, parts.port
        if parts.scheme not in ("http", "https"):
            raise ValueError("it does not begin with http://")
    except ValueError as error:
        raise UsageError(
            f"{shown!r} is no address of a server ({error}): it should look like http://master:8642"
        ) from None
    if not host:
        raise UsageError(f"{shown!r} names no host: it should look like http://master:8642")
    host = f"[{host}]" if ":" in host else host
    plain = f"{parts.scheme}://{host}" + (f":{port}" if port else "") + parts.path.rstrip("/")
    within = unquote(parts.password or parts.username or "")
    return ServerAddress(url=plain, token=token or within or env.get("HANGWATCH_TOKEN") or None)


@contextlib.contextmanager
def open_client(args: argparse.Namespace, env: Mapping[str, str]) -> Iterator[Client]:
    """A client of the server that ``args.url``, ``args.token`` and the environment name."""
    with contextlib.closing(Client(parse_address(args.url, args.token, env))) as client:
        yield client


class Client:
    """One connection to one server. Every method raises a `CliError` that says what to do."""

    def __init__(self, server: ServerAddress, transport: httpx.BaseTransport | None = None) -> None:
        self.server = server
        self.server_time = datetime.now(timezone.utc)  # the server's clock, as of its last answer
        headers = {"Accept": "application/json"} | (
            {"Authorization": f"Bearer {server.token}"} if server.token else {}
        )
        # A proxy for the world outside knows no master node.
        self._http = httpx.Client(
            headers=headers, timeout=TIMEOUT_S, trust_env=False, transport=transport
        )

    def close(self) -> None:
        self._http.close()

    def get(self, path: str, **query: object) -> dict[str, Any]:
        """The document at ``/api/v1/path``; parameters that are None are left out."""
        return self._request_document(
            "GET",
            f"{self.server.url}/api/v1/{path}",
            params={k: str(v) for k, v in query.items() if v is not None},
        )

    def post(self, path: str, body: Mapping[str, object]) -> dict[str, Any]:
        return self._request_document("POST", f"{self.server.url}/api/v1/{path}", json=body)

    def download_file(self, path: str) -> bytes:
        """The file at ``/api/v1/path``."""
        return self._send_request("GET", f"{self.server.url}/api/v1/{path}").content

    def stream_events(self, path: str, **query: object) -> Iterator[tuple[str, dict[str, Any]]]:
        """The server-sent events at ``/api/v1/path``, each its kind and what it says."""
        url = f"{self.server.url}/api/v1/{path}"
        params: dict[str, Any] = {k: v for k, v in query.items() if v is not None}
        how: dict[str, Any] = {
            "params": params,
            "headers": {"Accept": "text/event-stream"},
            "timeout": STREAM_TIMEOUT_S,
        }
        kind = ""
        with self._translate_errors(), self._http.stream("GET", url, **how) as answer:
            if not answer.is_success:
                answer.read()
                raise self._build_error(answer)
            for line in answer.iter_lines():
                if line.startswith("event: "):
                    kind = line[7:]
                elif line.startswith("data: "):
                    yield kind, json.loads(line[6:])

    def iter_items(self, path: str, **query: object) -> Iterator[dict[str, Any]]:
        """All items of a list, page after page."""
        page = self.get(path, **query)
        at = f"{self.server.url}/api/v1/{path}"
        for _ in range(_MAX_PAGES):
            yield from page.get("items") or []
            if not page.get("next"):
                return
            # Only where to go on is taken from the answer, never to which host: the token goes with
            # it.
            following = urlsplit(urljoin(at, str(page["next"])))
            origin = urlsplit(self.server.url)
            page = self._request_document(
                "GET", f"{origin.scheme}://{origin.netloc}{following.path}?{following.query}"
            )

    def _request_document(self, method: str, url: str, **how: Any) -> dict[str, Any]:
        return self._parse_document(self._send_request(method, url, **how))

    def _send_request(self, method: str, url: str, **how: Any) -> httpx.Response:
        with self._translate_errors():
            response = self._http.request(method, url, **how)
        self.server_time = _parse_server_time(response.headers.get("Date"), self.server_time)
        if not response.is_success:
            raise self._build_error(response)
        return response

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Raises UnreachableError for what goes wrong on the way."""
        try:
            yield
        except httpx.TimeoutException:
            raise UnreachableError(
                f"no answer from {self.server.url} within {TIMEOUT_S:.0f} s: is its host up, and"
                " does a firewall let this one in?"
            ) from None
        except httpx.TransportError as error:
            raise UnreachableError(
                f"cannot reach {self.server.url}: {error}. Start `hangwatch-server` there, or name"
                " another with --url or HANGWATCH_URL"
            ) from None

    def _parse_document(self, response: httpx.Response) -> dict[str, Any]:
        try:
            document = response.json()
        except (json.JSONDecodeError, UnicodeDecodeError):
            document = None
        if not isinstance(document, dict):
            raise CliError(
                f"{self.server.url} answers, but not as a hangwatch-server does: is this the right"
                " address?"
            )
        return document

    def _build_error(self, response: httpx.Response) -> CliError:
        try:
            told = response.json()
            detail = str(told.get("detail") or told.get("title") or "")
        except (json.JSONDecodeError, UnicodeDecodeError, AttributeError):
            detail = ""
        if response.status_code in (401, 403):
            return RefusedError(
                f"{self.server.url} refuses the token: compare it with the HANGWATCH_URL line that"
                " the server printed at its start"
                if self.server.token
                else (
                    f"{self.server.url} wants a token: give --token, HANGWATCH_TOKEN, or the URL as"
                    " http://:TOKEN@host:port"
                )
            )
        if response.status_code == 404 and detail:
            return NotFoundError(detail)
        if response.status_code == 404 or response.is_redirect:
            return CliError(
                f"{self.server.url} answers, but not as a hangwatch-server does: is this the right"
                " address?"
            )
        return CliError(
            f"{self.server.url} answers {response.status_code}{': ' + detail if detail else ''}"
        )


def _parse_server_time(date: str | None, default: datetime) -> datetime:
    """The server's own time (RFC 9110, 6.6.1), since ages against another host's clock would
    mislead.
    """
    try:
        return email.utils.parsedate_to_datetime(date).astimezone(timezone.utc) if date else default
    except (TypeError, ValueError):
        return default
