"""A real `hangwatch-server` for one test."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from .processes import clean_environment

COMMAND = Path(sys.executable).with_name("hangwatch-server")
START_S = 60.0


class ServerError(Exception):
    """The server did not come up. Carries what it wrote."""


@dataclass(slots=True)
class Server:
    """``url`` is what HANGWATCH_URL must be."""

    folder: Path
    stall_after_s: float
    host: str = "127.0.0.1"
    port: int = 0
    url: str = ""
    _process: subprocess.Popen[bytes] | None = None
    _client: httpx.Client = field(default_factory=httpx.Client)

    def start(self) -> None:
        """Starts it, on the same port and folder as before if it had been started already."""
        self.folder.mkdir(parents=True, exist_ok=True)
        out, err = self.folder / "stdout", self.folder / "stderr"
        options = ["--host", self.host, "--port", str(self.port)]
        options += [
            "--data-dir",
            str(self.folder / "data"),
            "--stall-after",
            str(self.stall_after_s),
        ]
        with out.open("wb") as stdout, err.open("ab") as stderr:
            self._process = subprocess.Popen(
                [str(COMMAND), *options],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=clean_environment(),
                cwd=self.folder,
                start_new_session=True,
            )
        process = self._process
        found: re.Match[str] | None = None
        deadline = time.monotonic() + START_S
        while found is None and time.monotonic() < deadline and process.poll() is None:
            found = re.search(r"HANGWATCH_URL=(\S+)\n", out.read_text())
            time.sleep(0.05)
        if found is None:
            self.stop()
            raise ServerError(
                f"no HANGWATCH_URL= line from {COMMAND.name}:\n{out.read_text()}{err.read_text()}"
            )
        self.url = found.group(1)
        self.port = httpx.URL(self.url).port or 80
        self._client = httpx.Client(timeout=10.0, trust_env=False)

    def stop(self, signal_number: signal.Signals = signal.SIGTERM) -> None:
        self._client.close()
        if self._process is None:
            return
        self._process.send_signal(signal_number)
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    @property
    def pid(self) -> int:
        """Of its process. Raises ServerError where there is none."""
        if self._process is None:
            raise ServerError("it does not run")
        return self._process.pid

    def get(self, path: str, **query: str | int) -> Any:
        """A JSON answer of the API. Raises httpx.HTTPError."""
        return self._client.get(f"{self.url}/api/v1/{path}", params=query).raise_for_status().json()

    def post(self, path: str, document: Any) -> Any:
        """A JSON answer of the API. Raises httpx.HTTPError."""
        return (
            self._client.post(f"{self.url}/api/v1/{path}", json=document).raise_for_status().json()
        )

    def get_text(self, path: str) -> str:
        return self._client.get(f"{self.url}/api/v1/{path}").raise_for_status().text

    def get_items(self, path: str, **query: str | int) -> list[dict[str, Any]]:
        """A whole list of the API, page by page; empty as long as the job in `query` has not been
        heard of.
        """
        try:
            page = self.get(path, **query)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != 404 or "job" not in query:
                raise
            return []
        found = list(page["items"])
        while page["next"]:
            page = (
                self._client.get(httpx.URL(self.url).join(page["next"])).raise_for_status().json()
            )
            found += page["items"]
        return found

    def read_log(self) -> str:
        return (self.folder / "stderr").read_text()


@contextlib.contextmanager
def running_server(
    folder: Path, stall_after_s: float = 4.0, host: str = "127.0.0.1"
) -> Iterator[Server]:
    """Runs a server for the length of the block."""
    server = Server(folder, stall_after_s, host)
    try:
        server.start()
        yield server
    finally:
        server.stop()
