"""A server for node agents: it records their heartbeats and replies as the test decides."""

from __future__ import annotations

import threading
import time
from typing import Any

from hangwatch.protocol.heartbeat import StreamUpdate

from .http_receiver import HttpReceiver, HttpReply, ReceivedRequest, make_json_reply
from .waiting import wait_for_value


class HeartbeatReceiver(HttpReceiver):
    """``heartbeats`` contains the accepted ones, with stream updates as objects. ``tokens`` and
    ``urgent_flags`` have one entry for each request.
    """

    def __init__(self) -> None:
        super().__init__()
        self.heartbeats: list[dict[str, Any]] = []
        self.commands: list[dict[str, Any]] = []  # sent with the next reply
        self.resync = False  # whether the next reply requests everything
        self.status = 200
        self.retry_after = 0
        self.interval_s = 0.1
        self.last_reply_delay_s = 0.0  # of the reply to an agent's last heartbeat
        self.changes_within_s: float | None = None
        self.details_s: float | None = None
        self._lock = threading.Lock()

    @property
    def agent_url(self) -> str:
        """What HANGWATCH_URL must be: with a token, and below another path."""
        return f"{self.url.replace('//', '//:secret@')}/prefix/"

    @property
    def tokens(self) -> list[str | None]:
        return [request.headers.get("authorization") for request in self.requests]

    @property
    def urgent_flags(self) -> list[bool]:
        return [request.headers.get("priority") == "u=1" for request in self.requests]

    def make_reply(self, request: ReceivedRequest) -> HttpReply:
        if request.path != "/prefix/api/v1/heartbeats":
            return make_json_reply({}, 404)
        if self.status != 200:
            headers = {"Retry-After": str(self.retry_after)} if self.retry_after else {}
            return make_json_reply({}, self.status, **headers)
        with self._lock:
            self.heartbeats.append(_name_stream_fields(request.parse_json()))
            commands, self.commands = self.commands, []
            resync, self.resync = self.resync, False
        if self.heartbeats[-1].get("gone"):
            time.sleep(self.last_reply_delay_s)
        return make_json_reply(
            {
                "interval_s": self.interval_s,
                "changes_s": self.changes_within_s,
                "details_s": self.details_s,
                "resync": resync,
                "commands": commands,
            }
        )

    def list_updates(self, rank: int | None = None) -> list[dict[str, Any]]:
        """All updates so far, of one rank if given; each has the identity last sent for its key."""
        identities: dict[str, dict[str, Any]] = {}
        updates = []
        for beat in list(self.heartbeats):
            for update in beat.get("processes", ()):
                if "identity" in update:
                    identities[update["key"]] = update["identity"]
                updates.append({**update, "identity": identities[update["key"]]})
        return [update for update in updates if rank is None or update["identity"]["rank"] == rank]

    def find_exit_update(self, rank: int) -> dict[str, Any] | None:
        return next((update for update in self.list_updates(rank) if "ended" in update), None)

    def list_samples(self) -> list[dict[str, Any]]:
        return [sample for beat in list(self.heartbeats) for sample in beat.get("samples", ())]

    def send_command(self, key: str, **command: Any) -> None:
        with self._lock:
            self.commands.append(
                {"id": f"c{time.monotonic_ns()}", "kind": "stacks", "key": key, **command}
            )

    def request_stacks(self, key: str, **command: Any) -> dict[str, Any]:
        """Requests stacks and waits for them."""
        before = len(self.list_samples())
        self.send_command(key, **command)
        wait_for_value(lambda: len(self.list_samples()) > before, "the requested stacks")
        return self.list_samples()[-1]


def _name_stream_fields(beat: dict[str, Any]) -> dict[str, Any]:
    for process in beat.get("processes", ()):
        if "streams" in process:
            updates = process["streams"]
            process["streams"] = [
                dict(zip(StreamUpdate._fields, update, strict=False)) for update in updates
            ]
    return beat
