"""Telling people: a line on stderr, and the incident as JSON to each alert URL, without ever holding up the server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import TextIO
from urllib.parse import urlsplit

import httpx

from hangwatch.types import Severity

from . import schema

TRIES = 5
BACKOFF = 1.0  # seconds before the second try; doubles with each
TIMEOUT = 10.0


def sentence(incident: schema.Incident) -> str:
    """``job run7: SUMMARY [train.py:41 in step]``"""
    site = incident.site
    where = f" [{site.file.rsplit('/', 1)[-1]}:{site.line} in {site.function}]" if site else ""
    return f"job {incident.job}: {incident.summary}{'' if where.strip(' []') in incident.summary else where}"


class Alerter:
    """Sends alerts in the background. Must be made inside a running event loop."""

    def __init__(
        self,
        channels: Sequence[str],
        url_of: Callable[[str], str],
        *,
        out: TextIO | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        backoff: float = BACKOFF,
    ) -> None:
        self._channels = channels
        self._url_of = url_of
        self._out = out
        self._backoff = backoff
        self._client = httpx.AsyncClient(timeout=TIMEOUT, transport=transport)
        self._tasks: set[asyncio.Task[None]] = set()
        self.sent = 0
        self.failed = 0

    def announce(self, incident: schema.Incident) -> None:
        """Says it once on stderr; an alert, as opposed to a warning, goes to the channels too."""
        url = self._url_of(incident.id)
        self._say(f"{incident.severity.value.upper()} {sentence(incident)} {url}")
        if incident.severity is not Severity.ALERT:
            return
        body = {**incident.model_dump(mode="json"), "text": f"hangwatch: {sentence(incident)} {url}", "url": url}
        for channel in self._channels:
            task = asyncio.create_task(self._post(channel, body))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Gives what is on its way a moment more."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)
        for task in self._tasks:
            task.cancel()
        await self._client.aclose()

    async def _post(self, channel: str, body: dict[str, object]) -> None:
        why = ""
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(self._backoff * 2 ** (attempt - 1))
            try:
                answer = await self._client.post(channel, json=body)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                why = f"{type(error).__name__}: {error}"
                continue
            if answer.is_success:
                self.sent += 1
                return
            why = f"it answered {answer.status_code}"
            if answer.is_client_error and answer.status_code not in (408, 429):
                break  # it would say the same again
        self.failed += 1
        self._say(f"alert channel {_shown(channel)} failed ({why}): check the --alert URL and that it can be reached from here")

    def _say(self, line: str) -> None:
        print(f"hangwatch: {line}", file=self._out or sys.stderr, flush=True)


def _shown(url: str) -> str:
    """Without path and credentials, which are secrets of many chat services."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}"
