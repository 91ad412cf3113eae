"""A client of the server's API for the command line."""

from __future__ import annotations

import argparse
import contextlib
import email.utils
import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any
from urllib.parse import quote

import httpx

from hangwatch.model.ownership import is_trusted_uid
from hangwatch.protocol.local_peer import find_peer_uid, is_loopback_peer
from hangwatch.report.text import Document, abbreviate_list

from ..transport.client import ServerTarget, TargetError, parse_targets
from .arguments import DEFAULT_URL
from .errors import CliError, NotFoundError, RefusedError, UnreachableError, UsageError

_TIMEOUT_S = 10.0
_STREAM_TIMEOUT_S = 30.0  # the server sends something on a stream more often than that
_PROBE_TIMEOUT_S = 2.0
_MAX_PAGES = 1000  # protects against a server whose list never ends
_MAX_JOBS_NAMED = 8  # in a message


def parse_address(url: str | None, token: str | None, env: Mapping[str, str]) -> ServerTarget:
    """The address from the flag, else from HANGWATCH_URL, else the default. Of several servers, it is
    the first that accepts connections, or else the first: servers with a shared database show the
    incidents of all. Raises UsageError if it is not a URL.

    The token comes from the flag, else from the URL (``http://:TOKEN@host``), else from
    HANGWATCH_TOKEN.
    """
    urls = url or env.get("HANGWATCH_URL") or DEFAULT_URL
    try:
        targets = parse_targets(urls, env.get("HANGWATCH_TOKEN", ""))
    except TargetError as error:
        raise UsageError(f"{error.problem}: an example is http://master:8642") from None
    chosen = targets[0]
    if len(targets) > 1:
        for target in targets:
            with contextlib.suppress(OSError):
                socket.create_connection((target.host, target.port), _PROBE_TIMEOUT_S).close()
                chosen = target
                break
    return replace(chosen, token=token) if token else chosen


def build_path(collection: str, item: object) -> str:
    """The path of an item with this id, below ``/api/v1/``."""
    return f"{collection}/{quote(str(item), safe='')}"


def open_client(args: argparse.Namespace) -> contextlib.AbstractContextManager[Client]:
    """A client for the address in ``args.url``, ``args.token`` and the environment."""
    return contextlib.closing(Client(parse_address(args.url, args.token, os.environ)))


def _omit_none(values: Mapping[str, object]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


class Client:
    """A connection to one server. Every method may raise a `CliError` with the remedy."""

    def __init__(self, server: ServerTarget) -> None:
        self.server = server
        self.server_time = datetime.now(timezone.utc)  # the server's clock at its last response
        headers = {"Accept": "application/json"}
        self._extensions: dict[str, Any] = {}
        if server.token:
            headers["Authorization"] = f"Bearer {server.token}"
            # A server with https proves by its certificate whose it is.
            if server.base_url.startswith("http:") and sys.platform == "linux":
                self._extensions["trace"] = self._check_connection
        self._http = httpx.Client(
            base_url=f"{server}/api/v1/",
            headers=headers,
            timeout=_TIMEOUT_S,
            trust_env=False,  # the environment's proxy leads out of the cluster
        )

    def close(self) -> None:
        self._http.close()

    def _check_connection(self, event: str, details: Mapping[str, Any]) -> None:
        """Refuses a new connection on which the token would be sent to another user's process, as far as
        the kernel says whose it is.
        """
        if event != "connection.connect_tcp.complete":
            return
        connection = details["return_value"].get_extra_info("socket")
        if not is_loopback_peer(connection):
            return
        uid = find_peer_uid(connection, _PROBE_TIMEOUT_S)
        if is_trusted_uid(uid):
            return
        import pwd  # there is none on Windows

        connection.close()
        user = "the kernel does not say which one"
        if uid is not None:
            user = f"uid {uid}"
            with contextlib.suppress(KeyError):  # the user has no name here
                user = pwd.getpwuid(uid).pw_name
        raise RefusedError(
            f"a process of another user ({user}) listens at {self.server}, and the token is not sent"
            " to it: if it is the server, give --url with the address by which other hosts reach it,"
            " or serve it by https"
        )

    def get(self, path: str, **query: object) -> Document:
        """The document at ``/api/v1/path``; parameters that are None are left out."""
        return self._request_document("GET", path, params=_omit_none(query))

    def post(self, path: str, **body: object) -> Document:
        """The document in the response; fields of the body that are None are left out."""
        return self._request_document("POST", path, json=_omit_none(body))

    def download_file(self, path: str) -> bytes:
        """The file at ``/api/v1/path``."""
        return self._send_request("GET", path).content

    def stream_events(self, path: str, **query: object) -> Iterator[tuple[str, Document]]:
        """The kind and the data of each server-sent event at ``/api/v1/path``."""
        stream = self._http.stream(
            "GET",
            path,
            params=_omit_none(query),
            headers={"Accept": "text/event-stream"},
            timeout=_STREAM_TIMEOUT_S,
            extensions=self._extensions,
        )
        kind = ""
        with self._translate_errors(), stream as response:
            if not response.is_success:
                response.read()
                raise self._build_error(response)
            for line in response.iter_lines():
                if line.startswith("event: "):
                    kind = line[7:]
                elif line.startswith("data: "):
                    yield kind, json.loads(line[6:])

    def iter_items(self, path: str, **query: object) -> Iterator[Document]:
        """All items of a list, page by page."""
        page = self.get(path, **query)
        list_url = self._http.base_url.join(path)
        for _ in range(_MAX_PAGES):
            yield from page.get("items") or []
            if not page.get("next"):
                return
            # Scheme and host of the next page's URL are ignored, since the token is sent there.
            next_path = list_url.join(str(page["next"])).raw_path
            page = self._request_document("GET", str(list_url.copy_with(raw_path=next_path)))

    def check_job(self, job: str) -> None:
        """Raises NotFoundError, which lists the known jobs, for an unknown one."""
        names = {str(known.get("job", "?")) for known in self.iter_items("jobs")}
        if not names:
            raise NotFoundError(f"no job {job!r} has reported; none has so far")
        if job not in names:
            known = abbreviate_list(sorted(names), _MAX_JOBS_NAMED)
            raise NotFoundError(f"no job {job!r} has reported; known: {known}")

    def _request_document(self, method: str, url: str, **options: Any) -> Document:
        response = self._send_request(method, url, **options)
        try:
            document = response.json()
        except (json.JSONDecodeError, UnicodeDecodeError):
            document = None
        if not isinstance(document, dict):
            raise self._build_address_error()
        return document

    def _send_request(self, method: str, url: str, **options: Any) -> httpx.Response:
        with self._translate_errors():
            response = self._http.request(method, url, extensions=self._extensions, **options)
        # RFC 9110, 6.6.1: ages by the clock of this host could be wrong.
        with contextlib.suppress(TypeError, ValueError):  # there is no date, or an invalid one
            date = email.utils.parsedate_to_datetime(response.headers.get("Date"))
            self.server_time = date.astimezone(timezone.utc)
        if not response.is_success:
            raise self._build_error(response)
        return response

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Raises UnreachableError in place of connection errors."""
        try:
            yield
        except httpx.TimeoutException:
            raise UnreachableError(
                f"no answer from {self.server} within {_TIMEOUT_S:.0f} s: is its host up, and"
                " does its firewall accept connections from this host?"
            ) from None
        except httpx.TransportError as error:
            raise UnreachableError(
                f"cannot reach {self.server}: {error}. Start `hangwatch-server` there, or give"
                " another address with --url or HANGWATCH_URL"
            ) from None

    def _build_error(self, response: httpx.Response) -> CliError:
        detail, status = "", response.status_code
        with contextlib.suppress(json.JSONDecodeError, UnicodeDecodeError, AttributeError):
            document = response.json()
            detail = str(document.get("detail") or document.get("title") or "")
        if status in (401, 403) and self.server.token:
            return RefusedError(
                f"{self.server} refuses the token: compare it with the HANGWATCH_URL line that"
                " the server printed when it started"
            )
        if status in (401, 403):
            return RefusedError(
                f"{self.server} requires a token: give --token, HANGWATCH_TOKEN, or the URL as"
                " http://:TOKEN@host:port"
            )
        if status == 404 and detail:
            return NotFoundError(detail)
        if status == 404 or response.is_redirect:
            return self._build_address_error()
        return CliError(f"{self.server} answers {status}{f': {detail}' if detail else ''}")

    def _build_address_error(self) -> CliError:
        return CliError(
            f"{self.server} answers, but not as a hangwatch-server does: is this the right address?"
        )
