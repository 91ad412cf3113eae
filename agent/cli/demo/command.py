"""`hangwatch demo`: a server, a job of four ranks, a planted hang and its verdict, on one machine and in one command."""

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

from hangwatch.report.terminal import incident
from hangwatch.report.text import clean

from ..client import Client, address
from ..errors import ERROR, OK, CliError, UnreachableError
from ..terminal import paint, say, say_json, tell
from .processes import Stage

RANKS = 4
CULPRIT = 2
JOB = "demo"
STALL_AFTER_S = 5
SERVER_S, TRAINING_S, VERDICT_S, STACK_S = 20.0, 60.0, 30.0, 8.0  # limits of the stages, in seconds
NEEDED = ("torch", "numpy", "fastapi", "uvicorn", "pydantic_settings", "jinja2", "sqlalchemy")
PLANTED = "# planted"
_POLL_S = 0.1
_SERVER = "import sys; from hangwatch.server.main import main; sys.exit(main())"


class DemoError(CliError):
    """The demo itself failed; the message has the end of what the failing part said."""


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Runs the demo and returns `OK` if the verdict named the planted rank and line. Raises CliError."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoError(f"the demo needs {', '.join(missing)}: pip install 'hangwatch[demo]'")
    with _ends_cleanly():
        demo = _Demo(args, env)
        with contextlib.closing(demo):
            code = demo.play()
        demo.tell_end()
    return code


@contextlib.contextmanager
def _ends_cleanly() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind as Ctrl-C does, so that nothing is left behind."""

    def unwind(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, unwind) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Demo:
    def __init__(self, args: argparse.Namespace, env: Mapping[str, str]) -> None:
        self._args, self._env = args, env
        self._began = time.monotonic()
        self._page = ""  # the incident on the dashboard
        self._stage = Stage(env)

    def close(self) -> None:
        # A second Ctrl-C should not cut the clean-up short: it takes a few seconds at most.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._stage.close()
        finally:
            signal.signal(signal.SIGINT, before)

    def play(self) -> int:
        url = self._start_server()
        script, line = self._copy_script()
        launcher = self._start_job(url, script)
        with contextlib.closing(Client(address(url, None, {}))) as client:
            self._watch_training(launcher)
            found = self._verdict(client, launcher)
            if self._args.json:
                say_json(found)
            else:
                say(incident(found, client.now, paint(self._env)))
            right = names_planted(found, script.name, line)
            self._page = f"{client.server.url}/incidents/{found['id']}"
        sys.stdout.flush()  # before the messages that follow, where both go to one pipe
        if not self._args.json:
            self._explain(right, script, line)
        if self._args.keep:
            self._keep()
        return OK if right else ERROR

    def tell_end(self) -> None:
        hint = "" if self._args.keep else f"; the dashboard was {self._page} (`hangwatch demo --keep` leaves it running)"
        self._tell(f"all is ended and cleaned up{hint}")

    def _tell(self, message: str) -> None:
        tell(f"[{time.monotonic() - self._began:4.1f} s] {message}")

    def _start_server(self) -> str:
        """Starts the server on a free port and returns its address."""
        options = ("--port", "0", "--data-dir", str(self._stage.folder / "data"), "--stall-after", str(STALL_AFTER_S))
        # The working folder is the stage's own: nothing in it can shadow a module.
        server = self._stage.start("server", [sys.executable, "-c", _SERVER, *options])
        deadline = time.monotonic() + SERVER_S
        while time.monotonic() < deadline and server.poll() is None:
            for line in self._stage.said("server.out").splitlines():
                if line.startswith("HANGWATCH_URL="):
                    url = line.partition("=")[2].strip()
                    self._wait_ready(url, deadline)
                    self._tell(f"server up: {url}/ranks")
                    return url
            time.sleep(_POLL_S)
        raise DemoError(f"the server did not start\n{_end(self._stage.said('server.err'))}")

    def _wait_ready(self, url: str, deadline: float) -> None:
        with contextlib.closing(Client(address(url, None, {}))) as client:
            while time.monotonic() < deadline:
                with contextlib.suppress(UnreachableError):  # its address is printed just before it listens
                    client.get("jobs")
                    return
                time.sleep(_POLL_S)

    def _copy_script(self) -> tuple[Path, int]:
        """The training script and its planted line, outside site-packages: there it would count as a library's code."""
        source = Path(__file__).with_name("job.py").read_text(encoding="utf-8")
        script = self._stage.folder / "train.py"
        script.write_text(source, encoding="utf-8")
        return script, next(n for n, line in enumerate(source.splitlines(), start=1) if PLANTED in line)

    def _start_job(self, url: str, script: Path) -> subprocess.Popen[bytes]:
        torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), str(script))
        self._tell(f"HANGWATCH_URL={url} torchrun --standalone --nproc-per-node {RANKS} {script.name}")
        recorder = {"HANGWATCH_RECORDER": "python"}  # else a node agent may build the other one, for a job that does not come
        return self._stage.start("job", [sys.executable, "-m", *torchrun], HANGWATCH_URL=url, HANGWATCH_JOB=JOB, **recorder)

    def _watch_training(self, launcher: subprocess.Popen[bytes]) -> None:
        """Tells of the steps until they stop."""
        deadline = time.monotonic() + TRAINING_S
        last, since = "", time.monotonic()
        while time.monotonic() < deadline:
            self._check(launcher)
            steps = [line for line in self._stage.said("job.out").splitlines() if line.startswith("step ")]
            if steps and steps[-1] != last:
                if not last or len(steps) % 4 == 0:
                    self._tell(f"training: {clean(steps[-1])}")
                last, since = steps[-1], time.monotonic()
            elif last and time.monotonic() - since > 1.0:
                self._tell(f"rank {CULPRIT} now hangs and the others wait for it; the verdict is due in {STALL_AFTER_S} s")
                return
            time.sleep(_POLL_S)
        raise DemoError(f"the training did not begin within {TRAINING_S:.0f} s\n{_end(self._stage.said('job.err'))}")

    def _verdict(self, client: Client, launcher: subprocess.Popen[bytes]) -> dict[str, Any]:
        """The first alert, once it has the culprit's stack or `STACK_S` have passed."""
        deadline, found = time.monotonic() + VERDICT_S, None
        while time.monotonic() < deadline:
            self._check(launcher)
            alerts = [i for i in client.items("incidents", job=JOB) if i.get("severity") == "alert"]
            if alerts and found is None:
                deadline = time.monotonic() + STACK_S
            if alerts:
                found = client.get(f"incidents/{alerts[-1]['id']}")
                if _has_stack(found):
                    return found
            time.sleep(_POLL_S)
        if found is None:
            raise DemoError(f"no verdict within {VERDICT_S:.0f} s: `hangwatch doctor` may say why\n{_end(self._stage.said('job.err'))}")
        return found

    def _check(self, launcher: subprocess.Popen[bytes]) -> None:
        if launcher.poll() is not None:
            raise DemoError(f"the training ended with exit code {launcher.returncode}\n{_end(self._stage.said('job.err'))}")

    def _explain(self, right: bool, script: Path, line: int) -> None:
        source = script.read_text(encoding="utf-8").splitlines()[line - 1].strip().partition("  #")[0]
        if right:
            self._tell(f"right: the planted line is {script.name}:{line}, `{source}`, on rank {CULPRIT}")
        else:
            self._tell(f"wrong: the planted line is {script.name}:{line}, `{source}`, on rank {CULPRIT}; please report this")

    def _keep(self) -> None:
        self._tell(f"everything is left running: look at {self._page}, and end it with Ctrl-C")
        with contextlib.suppress(KeyboardInterrupt):  # that is how it ends
            while True:
                time.sleep(3600)


def names_planted(document: Mapping[str, Any], file: str, line: int) -> bool:
    """Whether an incident blames the planted rank alone and has the planted line: its site, or a frame of its stacks."""
    culprits = document.get("culprits")
    frames = [f for s in document.get("stacks") or [] if s.get("ranks") == [CULPRIT] for f in s.get("frames") or []]
    places = [*frames, document.get("site") or {}]
    return culprits == [CULPRIT] and any(Path(str(p.get("file", ""))).name == file and p.get("line") == line for p in places)


def _has_stack(document: Mapping[str, Any]) -> bool:
    culprits = set(document.get("culprits") or [])
    return any(culprits & set(s.get("ranks") or []) and (s.get("frames") or s.get("error")) for s in document.get("stacks") or [])


def _end(text: str, lines: int = 12) -> str:
    return "\n".join("  " + clean(line) for line in text.splitlines()[-lines:]) or "  (it said nothing)"
