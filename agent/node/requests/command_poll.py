"""Waits for the server's commands, so that they need not wait for the reply to the next heartbeat."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable

from hangwatch.protocol.codec import decode_commands
from hangwatch.protocol.commands import Command
from hangwatch.protocol.heartbeat import COMMANDS_PATH

from ...transport.client import TransportError
from ...transport.signed import SignedClient
from ...transport.target import ServerTarget

_TIMEOUT_S = 5.0  # to connect, and for the reply after the server has waited


class CommandPoll:
    """A thread that keeps one request open, while the server permits it. ``wake`` is called when
    `take_commands` has something.
    """

    def __init__(self, agent: str, wake: Callable[[], None]) -> None:
        self._body = json.dumps({"agent": agent}).encode()
        self._target: ServerTarget | None = None  # the server that permitted it last
        self._client: SignedClient | None = None  # of the thread
        self._wake = wake
        self._wait_s = 0.0
        self._is_permitted = threading.Event()
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def permit(self, wait_s: float | None, target: ServerTarget) -> None:
        """Called with each reply to a heartbeat: the server waits up to ``wait_s`` seconds for
        commands; None: it does not.
        """
        if wait_s is None:
            self._is_permitted.clear()
            return
        self._wait_s, self._target = wait_s, target
        self._is_permitted.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="commands", daemon=True)
            self._thread.start()

    def take_commands(self) -> list[Command]:
        return [self._commands.get_nowait() for _ in range(self._commands.qsize())]

    def close(self) -> None:
        self._is_closed = True
        self._is_permitted.set()
        if self._thread is not None:
            if (client := self._client) is not None:
                client.abort()
            self._thread.join(1.0)

    def _run(self) -> None:
        target = None
        while True:
            self._is_permitted.wait()
            if self._is_closed:
                break
            if self._target is not target and self._target is not None:
                target = self._target
                self._close_client()
                self._client = SignedClient(target, _TIMEOUT_S)
            try:
                commands = self._request_commands()
            except Exception:  # the next reply to a heartbeat permits another attempt
                self._is_permitted.clear()
                continue
            for command in commands:
                self._commands.put(command)
            if commands:
                self._wake()
        self._close_client()

    def _close_client(self) -> None:
        if self._client is not None:
            self._client.close()

    def _request_commands(self) -> tuple[Command, ...]:
        """Raises TransportError, and whatever a malformed reply causes."""
        client = self._client
        assert client is not None  # see `_run`
        reply = client.send_request(
            "POST",
            COMMANDS_PATH,
            self._body,
            {"Content-Type": "application/json"},
            read_timeout_s=self._wait_s + _TIMEOUT_S,
        )
        if reply.status != 200:
            raise TransportError(f"the server answers {reply.status}")
        commands = decode_commands(reply.parse_json()["commands"])
        if commands and not client.is_server_known:
            raise TransportError("who answers is not known")
        return commands
