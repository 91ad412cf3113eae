"""Reports a simulated job to a server over HTTP, as the node agents of its hosts would."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from hangwatch.model.ranks import ExitInfo
from hangwatch.protocol import codec, heartbeat

from .simulated_job import SimulatedJob
from .waiting import wait_for_value

T = TypeVar("T")


def post_heartbeat(client: httpx.Client, beat: heartbeat.Heartbeat) -> dict[str, Any]:
    """Returns the server's reply. Raises httpx.HTTPError."""
    response = client.post("/api/v1/heartbeats", json=codec.encode_message(beat))
    reply: dict[str, Any] = response.raise_for_status().json()
    return reply


@dataclass(slots=True)
class JobReporter:
    """One node agent for each host of the job. The base URL of ``client`` is the server's."""

    client: httpx.Client
    job: SimulatedJob
    agent: str = ""  # prefix of the agents' ids; else the job's name
    resync_count: int = 0  # how often the server requested a full heartbeat
    _heartbeat_numbers: dict[int, int] = field(default_factory=dict)  # by host

    @classmethod
    def connect(cls, url: str, job: SimulatedJob) -> JobReporter:
        """A reporter with a client of its own, which `end_job` and `reporting` close."""
        return cls(httpx.Client(base_url=url, trust_env=False, timeout=120), job)

    def send_heartbeat(self, host: int = 0) -> dict[str, Any]:
        """Sends one heartbeat of a host, a full one if it is the first or the server requests it.
        Replies to requests for stacks immediately. Returns the server's reply.
        """
        reply = self._send_updates(host, full=host not in self._heartbeat_numbers)
        if reply.get("resync"):
            self.resync_count += 1
            reply = self._send_updates(host, full=True)
        samples = tuple(
            self.job.take_sample(command)
            for command in reply.get("commands", ())
            if command["kind"] == "stacks"
        )
        if samples:
            self._post_heartbeat(host, samples=samples)
        return reply

    def send_until(self, probe: Callable[[], T | None], description: str) -> T:
        """Sends heartbeats of the first host until `probe` returns a true value."""

        def send_and_probe() -> T | None:
            self.send_heartbeat()
            return probe()

        return wait_for_value(send_and_probe, description, interval_s=0.1)

    @contextmanager
    def reporting(self, interval_s: float = 0.5) -> Iterator[None]:
        """Sends heartbeats of all hosts in the background while the context lasts."""
        stopped = threading.Event()

        def send_heartbeats() -> None:
            while not stopped.is_set():
                # A server that is gone may come back: then it requests what it has missed.
                with contextlib.suppress(httpx.TransportError):
                    for host in self.job.hosts:
                        self.send_heartbeat(host)
                stopped.wait(interval_s)

        thread = threading.Thread(target=send_heartbeats, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()
            self.client.close()

    def end_job(self) -> None:
        """Reports that all processes have exited with status 0, and closes the client."""
        exited = ExitInfo(exit_status=0)
        for host in self.job.hosts:
            updates = [
                dataclasses.replace(update, ended=exited)
                for update in self.job.make_process_updates(host, full=False)
            ]
            self._post_heartbeat(
                host, processes=tuple(updates), gone=tuple(update.key for update in updates)
            )
        self.client.close()

    def list_incidents(self) -> list[dict[str, Any]]:
        """The server's incidents of the job, the newest first."""
        response = self.client.get("/api/v1/incidents", params={"job": self.job.name})
        items: list[dict[str, Any]] = response.json()["items"]
        return items

    def agent_id(self, host: int = 0) -> str:
        return f"{self.agent or self.job.name}-{host}"

    def _send_updates(self, host: int, *, full: bool) -> dict[str, Any]:
        updates = self.job.make_process_updates(host, full=full)
        return self._post_heartbeat(host, full=full, processes=updates)

    def _post_heartbeat(self, host: int, **fields: Any) -> dict[str, Any]:
        number = self._heartbeat_numbers.get(host, 0) + 1
        self._heartbeat_numbers[host] = number
        beat = self.make_heartbeat(host, number, **fields)
        return post_heartbeat(self.client, beat)

    def make_heartbeat(self, host: int, number: int, **fields: Any) -> heartbeat.Heartbeat:
        """A heartbeat of this reporter's node agent on the host."""
        name = self.job.host.format(host)
        return heartbeat.Heartbeat(
            host=name,
            agent=self.agent_id(host),
            owner=f"run dir of {name}",
            number=number,
            **fields,
        )
