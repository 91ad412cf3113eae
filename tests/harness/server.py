"""A real `hangwatch-server` for one test."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.simulation.waiting import wait_until

from .processes import clean_environment

COMMAND = Path(sys.executable).with_name("hangwatch-server")
START_TIMEOUT_S, STOP_TIMEOUT_S = 60.0, 15.0


class ServerError(Exception):
    """The server did not start, or does not run."""


@dataclass(slots=True)
class Server:
    """``url`` is what HANGWATCH_URL must be. The data and the outputs are in ``folder``."""

    folder: Path
    flags: tuple[str, ...] = ()
    port: int = 0
    url: str = ""
    max_files: int | None = None  # open files of each of its processes
    command: tuple[str, ...] = (str(COMMAND),)
    _process: subprocess.Popen[bytes] | None = None
    _client: httpx.Client = field(default_factory=httpx.Client)

    def start(self) -> None:
        """Starts it; on the same port and with the same data if it has been started before. Raises
        ServerError with what it wrote.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        stdout_path = self.folder / "stdout"
        with stdout_path.open("wb") as stdout, (self.folder / "stderr").open("ab") as stderr:
            process = subprocess.Popen(
                [
                    *([] if self.max_files is None else ["prlimit", f"--nofile={self.max_files}"]),
                    *(*self.command, "--port", str(self.port)),
                    *("--data-dir", str(self.folder / "data"), *self.flags),
                ],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=clean_environment(),
                cwd=self.folder,
                start_new_session=True,
            )
        self._process = process

        def has_url_or_exited() -> bool:
            return bool(self.url_line) or process.poll() is not None

        wait_until(has_url_or_exited, START_TIMEOUT_S, 0.05)
        if not self.url_line:
            self.stop()
            output = stdout_path.read_text() + self.read_log()
            raise ServerError(f"no HANGWATCH_URL= line from {COMMAND.name}:\n{output}")
        self.url = self.url_line.partition("=")[2].rstrip("/")
        self.port = httpx.URL(self.url).port or 80
        headers = {}
        if "--token" in self.flags:
            token = self.flags[self.flags.index("--token") + 1]
            headers = {"Authorization": f"Bearer {token}"}
        self._client = httpx.Client(timeout=10.0, trust_env=False, headers=headers)

    def stop(self, signal_number: signal.Signals = signal.SIGTERM) -> int:
        """Returns the exit status; kills the server if it does not exit by itself."""
        self._client.close()
        if self._process is None:
            return 0
        process, self._process = self._process, None
        process.send_signal(signal_number)
        try:
            return process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    @property
    def pid(self) -> int:
        """The id of its process. Raises ServerError if it does not run."""
        if self._process is None:
            raise ServerError("it does not run")
        return self._process.pid

    @property
    def stall_after_s(self) -> float:
        """The value of --stall-after. Raises ValueError if that is not among the flags."""
        return float(self.flags[self.flags.index("--stall-after") + 1])

    @property
    def url_line(self) -> str:
        """The line with the URL that it printed; empty until then."""
        line = re.search(r"^HANGWATCH_URL=\S+(?=\n)", (self.folder / "stdout").read_text(), re.M)
        return line.group() if line else ""

    @property
    def loopback_url(self) -> str:
        """Its URL by loopback instead of the host's name."""
        return str(httpx.URL(self.url).copy_with(host="127.0.0.1")).rstrip("/")

    def get(self, path: str, **query: str | int) -> Any:
        """A JSON reply of the API. Raises httpx.HTTPError."""
        return self._client.get(f"{self.url}/api/v1/{path}", params=query).raise_for_status().json()

    def post(self, path: str, document: Any) -> Any:
        """A JSON reply of the API. Raises httpx.HTTPError."""
        return (
            self._client.post(f"{self.url}/api/v1/{path}", json=document).raise_for_status().json()
        )

    def get_text(self, path: str) -> str:
        return self._client.get(f"{self.url}/api/v1/{path}").raise_for_status().text

    def get_items(self, path: str, **query: str | int) -> list[dict[str, Any]]:
        """All pages of a list of the API; empty if the job in `query` is not known yet."""
        try:
            page = self.get(path, **query)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != 404 or "job" not in query:
                raise
            return []
        items = list(page["items"])
        while page["next"]:
            next_url = httpx.URL(self.url).join(page["next"])
            page = self._client.get(next_url).raise_for_status().json()
            items += page["items"]
        return items

    def read_log(self) -> str:
        return (self.folder / "stderr").read_text()


@contextlib.contextmanager
def run_server(folder: Path, *flags: str) -> Iterator[Server]:
    """Runs a server with these flags while the context lasts."""
    server = Server(folder, flags)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def running_server(
    folder: Path, stall_after_s: float = 4.0, host: str = "127.0.0.1"
) -> Iterator[Server]:
    """Runs a server that reports stalls soon while the context lasts."""
    with run_server(folder, "--stall-after", str(stall_after_s), "--host", host) as server:
        yield server


class ServerPool:
    """One server for each ``--stall-after``, started with these ``flags`` when it is first used, for
    jobs one after another or at the same time.
    """

    def __init__(self, folder: Path, flags: Sequence[str] = ()) -> None:
        self._folder = folder
        self._flags = flags
        self._lock = threading.Lock()
        self._servers: dict[float, Server] = {}
        self._running = contextlib.ExitStack()

    def __enter__(self) -> ServerPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self._running.close()

    @contextlib.contextmanager
    def use(self, stall_after_s: float) -> Iterator[Server]:
        with self._lock:
            server = self._servers.get(stall_after_s)
            if server is None:
                folder = self._folder / f"server-{stall_after_s:g}"
                limit = ("--stall-after", str(stall_after_s), "--host", "127.0.0.1")
                running = run_server(folder, *limit, *self._flags)
                server = self._servers[stall_after_s] = self._running.enter_context(running)
        yield server

    @property
    def servers(self) -> list[Server]:
        """The servers that were started."""
        with self._lock:
            return list(self._servers.values())
