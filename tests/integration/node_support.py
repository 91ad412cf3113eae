"""What the tests of the node agent share: a run directory with target processes and a node agent,
which reports to a `HeartbeatReceiver`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.simulation.heartbeat_receiver import HeartbeatReceiver
from tests.simulation.waiting import wait_for_value

TESTS_DIR = Path(__file__).parent


class AgentTestbed:
    """A run directory, and the processes that a test starts, which end with it."""

    def __init__(self, folder: Path, receiver: HeartbeatReceiver) -> None:
        self.folder = folder / "run"
        self.folder.mkdir(mode=0o700)
        self.receiver = receiver
        self.processes: list[subprocess.Popen[bytes]] = []
        self.command_prefix: list[str] = []

    def make_environ(self, **more: str) -> dict[str, str]:
        kept = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("HANGWATCH", "TORCHELASTIC")) and k != "RANK"
        }
        return (
            kept
            | {
                "HANGWATCH_URL": self.receiver.agent_url,
                "HANGWATCH_RUN_DIR": str(self.folder),
                "HANGWATCH_ON_HANG": "abort",
                "PYTHONSAFEPATH": "1",
            }
            | more
        )

    def start_process(
        self, command: list[str], *, env: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [*self.command_prefix, *command],
            env=env or self.make_environ(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.processes.append(process)
        return process

    def start_rank(
        self, rank: int, *commands: str, env: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """A rank; it has its ring when this returns."""
        process = self.start_process(
            [
                sys.executable,
                str(TESTS_DIR / "node_target.py"),
                str(self.folder),
                str(rank),
                *commands,
            ],
            env=env,
        )
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["pid"] == process.pid
        return process

    def start_agent(self, *more: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        return self.start_process(
            [
                sys.executable,
                "-m",
                "hangwatch.agent.node.main",
                "--run-dir",
                str(self.folder),
                "--foreground",
                "--linger",
                "0.5",
                *more,
            ],
            env=env,
        )

    def wait_until_reported(self, rank: int) -> dict[str, Any]:
        """The first update of a rank, once it is there."""
        update: dict[str, Any] = wait_for_value(
            lambda: self.receiver.list_updates(rank), f"rank {rank} is reported"
        )[0]
        return update

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGCONT)
                    process.kill()
            process.wait(10)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()


@contextlib.contextmanager
def open_testbed(folder: Path) -> Iterator[AgentTestbed]:
    with HeartbeatReceiver() as receiver:
        testbed = AgentTestbed(folder, receiver)
        try:
            yield testbed
        finally:
            testbed.close()
