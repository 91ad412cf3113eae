"""What the attacks share: each repeats one kind of hostile input until its time is over."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from hangwatch.agent.transport.client import TransportError

NICENESS = 10


class HostileError(Exception):
    """A process grew beyond its limit, ended, or stopped answering."""


@dataclass(slots=True)
class Attack:
    """``run_once`` may raise HostileError, and what a refusal or a closed connection raises."""

    name: str
    run_once: Callable[[random.Random], None]
    count: int = 0
    thread: threading.Thread | None = None
    error: str = ""

    def start(self, seed: int, ends_at: float) -> None:
        rng = random.Random(f"{seed} {self.name}")

        def run() -> None:
            # An attacker's CPU is not the server's, nor that of the jobs.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
            while time.monotonic() < ends_at and not self.error:
                try:
                    self.run_once(rng)
                except (OSError, httpx.HTTPError, TransportError):
                    pass  # the server refused it, or closed the connection
                except HostileError as error:
                    self.error = str(error)
                self.count += 1

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
