"""`hangwatch demo`: runs a server and a job of four ranks with a planted hang on this machine, and
prints the verdict.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from hangwatch.report.terminal import format_incident
from hangwatch.report.text import clean_text

from ..client import Client, parse_address
from ..errors import ERROR, OK, CliError, UnreachableError
from ..terminal import detect_paint, print_json, print_lines, print_message
from .processes import DemoSandbox
from .verdict import CULPRIT_RANK, has_culprit_stack, names_planted_line

WORLD_SIZE = 4
JOB_NAME = "demo"
STALL_AFTER_S = 5
# The limits of the stages.
SERVER_TIMEOUT_S = 20.0
TRAINING_TIMEOUT_S = 60.0
VERDICT_TIMEOUT_S = 30.0
STACK_TIMEOUT_S = 8.0
REQUIRED_MODULES = (
    "torch",
    "numpy",
    "fastapi",
    "uvicorn",
    "pydantic_settings",
    "jinja2",
    "sqlalchemy",
)
PLANTED_MARK = "# planted"
_POLL_S = 0.1
_SERVER_CODE = "import sys; from hangwatch.server.main import main; sys.exit(main())"


class DemoError(CliError):
    """The demo itself failed; the message ends with the last output of the failing part."""


def run_demo(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Runs the demo and returns `OK` if the verdict named the planted rank and line. Raises
    CliError.
    """
    missing = [name for name in REQUIRED_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoError(f"the demo needs {', '.join(missing)}: pip install 'hangwatch[demo]'")
    with _interrupt_on_signals():
        demo = _DemoRun(args, env)
        with contextlib.closing(demo):
            code = demo.run_stages()
        demo.print_end()
    return code


@contextlib.contextmanager
def _interrupt_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does, so that the demo cleans up."""

    def raise_interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {
        number: signal.signal(number, raise_interrupt) for number in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _DemoRun:
    def __init__(self, args: argparse.Namespace, env: Mapping[str, str]) -> None:
        self._args, self._env = args, env
        self._started_at = time.monotonic()
        self._incident_url = ""  # the incident on the dashboard
        self._sandbox = DemoSandbox(env)

    def close(self) -> None:
        # A second Ctrl-C must not interrupt the clean-up, which takes a few seconds at most.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._sandbox.close()
        finally:
            signal.signal(signal.SIGINT, before)

    def run_stages(self) -> int:
        url = self._start_server()
        script, line = self._copy_script()
        launcher = self._start_job(url, script)
        with contextlib.closing(Client(parse_address(url, None, {}))) as client:
            self._watch_training(launcher)
            incident = self._await_verdict(client, launcher)
            if self._args.json:
                print_json(incident)
            else:
                print_lines(format_incident(incident, client.server_time, detect_paint(self._env)))
            is_correct = names_planted_line(incident, script.name, line)
            self._incident_url = f"{client.server.url}/incidents/{incident['id']}"
        sys.stdout.flush()  # before the messages that follow, if both are sent to one pipe
        if not self._args.json:
            self._print_outcome(is_correct, script, line)
        if self._args.keep:
            self._keep_running()
        return OK if is_correct else ERROR

    def print_end(self) -> None:
        message = "everything has ended and is cleaned up"
        if not self._args.keep:
            message += (
                f"; the dashboard was {self._incident_url} (`hangwatch demo --keep` leaves it"
                " running)"
            )
        self._print_message(message)

    def _print_message(self, message: str) -> None:
        print_message(f"[{time.monotonic() - self._started_at:4.1f} s] {message}")

    def _start_server(self) -> str:
        """Starts the server on a free port and returns its address."""
        options = (
            "--port",
            "0",
            "--data-dir",
            str(self._sandbox.folder / "data"),
            "--stall-after",
            str(STALL_AFTER_S),
        )
        # The process runs in the demo's own folder, in which no file can shadow a module.
        server = self._sandbox.start_process(
            "server", [sys.executable, "-c", _SERVER_CODE, *options]
        )
        deadline = time.monotonic() + SERVER_TIMEOUT_S
        while time.monotonic() < deadline and server.poll() is None:
            for line in self._sandbox.read_output("server.out").splitlines():
                if line.startswith("HANGWATCH_URL="):
                    url = line.partition("=")[2].strip()
                    self._wait_ready(url, deadline)
                    self._print_message(f"server up: {url}/ranks")
                    return url
            time.sleep(_POLL_S)
        raise DemoError(
            "the server did not start\n"
            + _format_last_lines(self._sandbox.read_output("server.err"))
        )

    def _wait_ready(self, url: str, deadline: float) -> None:
        with contextlib.closing(Client(parse_address(url, None, {}))) as client:
            while time.monotonic() < deadline:
                # The server prints its address just before it listens.
                with contextlib.suppress(UnreachableError):
                    client.get("jobs")
                    return
                time.sleep(_POLL_S)

    def _copy_script(self) -> tuple[Path, int]:
        """Copies the training script out of site-packages, where it would count as a library's code.
        Returns its path and the number of the planted line.
        """
        source = Path(__file__).with_name("job.py").read_text(encoding="utf-8")
        script = self._sandbox.folder / "train.py"
        script.write_text(source, encoding="utf-8")
        return script, next(
            n for n, line in enumerate(source.splitlines(), start=1) if PLANTED_MARK in line
        )

    def _start_job(self, url: str, script: Path) -> subprocess.Popen[bytes]:
        torchrun = (
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(WORLD_SIZE),
            str(script),
        )
        self._print_message(
            f"HANGWATCH_URL={url} torchrun --standalone --nproc-per-node {WORLD_SIZE} {script.name}"
        )
        # Otherwise the node agent may build the native recorder, for which no further job has a use.
        recorder = {"HANGWATCH_RECORDER": "python"}
        return self._sandbox.start_process(
            "job",
            [sys.executable, "-m", *torchrun],
            HANGWATCH_URL=url,
            HANGWATCH_JOB=JOB_NAME,
            **recorder,
        )

    def _watch_training(self, launcher: subprocess.Popen[bytes]) -> None:
        """Prints the training steps until they stop."""
        deadline = time.monotonic() + TRAINING_TIMEOUT_S
        last, since = "", time.monotonic()
        while time.monotonic() < deadline:
            self._check_launcher(launcher)
            steps = [
                line
                for line in self._sandbox.read_output("job.out").splitlines()
                if line.startswith("step ")
            ]
            if steps and steps[-1] != last:
                if not last or len(steps) % 4 == 0:
                    self._print_message(f"training: {clean_text(steps[-1])}")
                last, since = steps[-1], time.monotonic()
            elif last and time.monotonic() - since > 1.0:
                self._print_message(
                    f"rank {CULPRIT_RANK} now hangs and the others wait for it; the verdict is due"
                    f" in {STALL_AFTER_S} s"
                )
                return
            time.sleep(_POLL_S)
        raise DemoError(
            f"the training did not start within {TRAINING_TIMEOUT_S:.0f} s\n"
            + _format_last_lines(self._sandbox.read_output("job.err"))
        )

    def _await_verdict(self, client: Client, launcher: subprocess.Popen[bytes]) -> dict[str, Any]:
        """The first alert, once it has the culprit's stack or `STACK_TIMEOUT_S` have passed."""
        deadline, incident = time.monotonic() + VERDICT_TIMEOUT_S, None
        while time.monotonic() < deadline:
            self._check_launcher(launcher)
            alerts = [
                i
                for i in client.iter_items("incidents", job=JOB_NAME)
                if i.get("severity") == "alert"
            ]
            if alerts and incident is None:
                deadline = time.monotonic() + STACK_TIMEOUT_S
            if alerts:
                incident = client.get(f"incidents/{alerts[-1]['id']}")
                if has_culprit_stack(incident):
                    return incident
            time.sleep(_POLL_S)
        if incident is None:
            raise DemoError(
                f"no verdict within {VERDICT_TIMEOUT_S:.0f} s: `hangwatch doctor` may show why\n"
                + _format_last_lines(self._sandbox.read_output("job.err"))
            )
        return incident

    def _check_launcher(self, launcher: subprocess.Popen[bytes]) -> None:
        if launcher.poll() is not None:
            raise DemoError(
                f"the training ended with exit code {launcher.returncode}\n"
                + _format_last_lines(self._sandbox.read_output("job.err"))
            )

    def _print_outcome(self, is_correct: bool, script: Path, line: int) -> None:
        source = (
            script.read_text(encoding="utf-8").splitlines()[line - 1].strip().partition("  #")[0]
        )
        if is_correct:
            self._print_message(
                f"right: the planted line is {script.name}:{line}, `{source}`, on rank"
                f" {CULPRIT_RANK}"
            )
        else:
            self._print_message(
                f"wrong: the planted line is {script.name}:{line}, `{source}`, on rank"
                f" {CULPRIT_RANK}; please report this"
            )

    def _keep_running(self) -> None:
        self._print_message(
            f"everything keeps running: open {self._incident_url}, and end it with Ctrl-C"
        )
        with contextlib.suppress(KeyboardInterrupt):  # the usual end
            while True:
                time.sleep(3600)


def _format_last_lines(text: str, line_count: int = 12) -> str:
    return (
        "\n".join("  " + clean_text(line) for line in text.splitlines()[-line_count:])
        or "  (no output)"
    )
