"""`hangwatch demo`: runs a server and a job of four ranks with a planted hang on this machine,
prints the verdict, and checks whether it names the planted rank and line.

The processes are in sessions of their own, so that the terminal's Ctrl-C does not reach them. They
have a mark in their environment, by which all of them are found and ended.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from hangwatch.report.terminal import format_incident
from hangwatch.report.text import Document, clean_text, get_parts

from ...environment.run_dir import make_private_folder
from ...node.system.processes import read_environ
from ..arguments import add_format_option
from ..client import Client, parse_address
from ..errors import ERROR, OK, CliError, UnreachableError
from ..terminal import print_message, print_result

WORLD_SIZE = 4
CULPRIT_RANK = 2
JOB_NAME = "demo"
STALL_AFTER_S = 5
SERVER_TIMEOUT_S = 20.0
TRAINING_TIMEOUT_S = 60.0
VERDICT_TIMEOUT_S = 30.0
STACK_TIMEOUT_S = 8.0
TERMINATION_S = 3.0
REQUIRED_MODULES = (
    "torch", "numpy", "fastapi", "uvicorn", "pydantic_settings", "jinja2", "sqlalchemy",
)  # fmt: skip
PLANTED_MARK = "# planted"
_POLL_S = 0.1
_MAX_OUTPUT_LINES = 12  # lines in a message
_SERVER_CODE = "import sys; from hangwatch.server.main import main; sys.exit(main())"
MARK_VARIABLE = "HANGWATCH_RUN_DIR"  # a folder of the demo is its value in the demo's processes

# Variables that a launcher or a watched job around the demo has set would change the demo's job.
_FOREIGN_PREFIXES = (
    "HANGWATCH_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_",
    "PET_", "TORCH_DEVICE_BACKEND_AUTOLOAD", "TORCH_NCCL_", "TORCH_DISTRIBUTED_DEBUG", "PYTHONPATH", "PYTHONSAFEPATH",
)  # fmt: skip


def add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    add_format_option(parser)
    parser.add_argument(
        "--keep", action="store_true", help="leave the server and the hung job running until Ctrl-C"
    )


class DemoError(CliError):
    """The demo itself failed. The message ends with the last output of the failing part."""


def run_demo(args: argparse.Namespace) -> int:
    """Runs the demo and returns `OK` if the verdict named the planted rank and line. Raises
    CliError.
    """
    missing = [name for name in REQUIRED_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoError(f"the demo needs {', '.join(missing)}: pip install 'hangwatch[demo]'")
    # SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does, so that the demo cleans up.
    with _handle_signals(signal.default_int_handler, signal.SIGTERM, signal.SIGHUP):
        with contextlib.closing(DemoSandbox(os.environ)) as sandbox:
            demo = _DemoRun(args, sandbox)
            code = demo.run_stages()
        message = "everything has ended and is cleaned up"
        if not args.keep:
            message += (
                f"; the dashboard was {demo.incident_url} (`hangwatch demo --keep` leaves it"
                " running)"
            )
        demo.print_message(message)
    return code


@contextlib.contextmanager
def _handle_signals(
    handler: signal.Handlers | Callable[[int, FrameType | None], object], *numbers: signal.Signals
) -> Iterator[None]:
    """Sets the handler of these signals for the time of the block."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former_handler in before.items():
            signal.signal(number, former_handler)


class _DemoRun:
    """The stages of a demo: the server, the job, its hang, the verdict."""

    def __init__(self, args: argparse.Namespace, sandbox: DemoSandbox) -> None:
        self._args = args
        self._sandbox = sandbox
        self._started_at = time.monotonic()
        self._launcher: subprocess.Popen[bytes] | None = None  # torchrun
        self.incident_url = ""  # the dashboard's page of the incident

    def run_stages(self) -> int:
        url = self._start_server()
        # The training script is copied out of site-packages, where it would count as a library's.
        source = Path(__file__).with_name("demo_job.py").read_text(encoding="utf-8").splitlines()
        line = next(n for n, text in enumerate(source, start=1) if PLANTED_MARK in text)
        script = self._sandbox.folder / "train.py"
        script.write_text("\n".join(source), encoding="utf-8")
        options = ["--standalone", "--nproc-per-node", str(WORLD_SIZE)]
        self.print_message(f"HANGWATCH_URL={url} torchrun {' '.join(options)} {script.name}")
        self._launcher = self._sandbox.start_process(
            "job",
            [sys.executable, "-m", "torch.distributed.run", *options, str(script)],
            HANGWATCH_URL=url,
            HANGWATCH_JOB=JOB_NAME,
            # Else the node agent may build the native recorder, for which no further job has a use.
            HANGWATCH_RECORDER="python",
        )
        with contextlib.closing(Client(parse_address(url, None, {}))) as client:
            self._watch_training()
            incident = self._await_verdict(client)
            print_result(self._args, incident, format_incident(incident, client.server_time))
            is_correct = names_planted_line(incident, script.name, line)
            self.incident_url = f"{client.server}/incidents/{incident['id']}"
        sys.stdout.flush()  # before the messages that follow, if both are sent to one pipe
        if not self._args.json:
            code = source[line - 1].strip().partition("  #")[0]
            outcome, request = ("right", "") if is_correct else ("wrong", "; please report this")
            self.print_message(
                f"{outcome}: the planted line is {script.name}:{line}, `{code}`, on rank"
                f" {CULPRIT_RANK}{request}"
            )
        if self._args.keep:
            self.print_message(
                f"everything keeps running: open {self.incident_url}, and end it with Ctrl-C"
            )
            with contextlib.suppress(KeyboardInterrupt):  # the usual end
                while True:
                    time.sleep(3600)
        return OK if is_correct else ERROR

    def print_message(self, message: str) -> None:
        print_message(f"[{time.monotonic() - self._started_at:4.1f} s] {message}")

    def _start_server(self) -> str:
        data = str(self._sandbox.folder / "data")
        options = ["--port", "0", "--data-dir", data, "--stall-after", str(STALL_AFTER_S)]
        # The process runs in the demo's own folder, in which no file can shadow a module.
        server = self._sandbox.start_process(
            "server", [sys.executable, "-c", _SERVER_CODE, *options]
        )
        for _ in self._poll(SERVER_TIMEOUT_S):
            if server.poll() is not None:
                break
            for line in self._sandbox.read_lines("server.out"):
                if not line.startswith("HANGWATCH_URL="):
                    continue
                url = line.partition("=")[2].strip()
                # The server prints its address just before it listens.
                with (
                    contextlib.suppress(UnreachableError),
                    contextlib.closing(Client(parse_address(url, None, {}))) as client,
                ):
                    client.get("jobs")
                    self.print_message(f"server up: {url}/ranks")
                    return url
        raise self._build_error("the server did not start", "server.err")

    def _poll(self, timeout_s: float) -> Iterator[None]:
        """Yields repeatedly for this time. Raises DemoError if the job ends."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._launcher is not None and self._launcher.poll() is not None:
                code = self._launcher.returncode
                raise self._build_error(f"the training ended with exit code {code}")
            yield
            time.sleep(_POLL_S)

    def _watch_training(self) -> None:
        """Prints the training steps until they stop."""
        last = ""
        since = time.monotonic()
        for _ in self._poll(TRAINING_TIMEOUT_S):
            lines = self._sandbox.read_lines("job.out")
            steps = [line for line in lines if line.startswith("step ")]
            if steps and steps[-1] != last:
                if not last or len(steps) % 4 == 0:
                    self.print_message(f"training: {clean_text(steps[-1])}")
                last = steps[-1]
                since = time.monotonic()
            elif last and time.monotonic() - since > 1.0:
                self.print_message(
                    f"rank {CULPRIT_RANK} now hangs and the others wait for it; the verdict is due"
                    f" in {STALL_AFTER_S} s"
                )
                return
        raise self._build_error(f"the training did not start within {TRAINING_TIMEOUT_S:.0f} s")

    def _await_verdict(self, client: Client) -> Document:
        """The first alert, once it has the culprit's stack or `STACK_TIMEOUT_S` have passed."""
        alerts: list[Document] = []
        for _ in self._poll(VERDICT_TIMEOUT_S):
            incidents = client.iter_items("incidents", job=JOB_NAME)
            alerts = [item for item in incidents if item.get("severity") == "alert"]
            if alerts:
                break
        if not alerts:
            raise self._build_error(
                f"no verdict within {VERDICT_TIMEOUT_S:.0f} s: `hangwatch doctor` may show why"
            )
        for _ in self._poll(STACK_TIMEOUT_S):
            incident = client.get(f"incidents/{alerts[-1]['id']}")
            culprits = set(incident["culprits"])
            for stack in incident["stacks"]:
                is_taken = stack["frames"] or stack["error"]
                if is_taken and not culprits.isdisjoint(stack["ranks"]):
                    return incident
        return incident

    def _build_error(self, problem: str, output: str = "job.err") -> DemoError:
        """The error with the last lines of a process's output."""
        last_lines = self._sandbox.read_lines(output)[-_MAX_OUTPUT_LINES:]
        shown = [f"  {clean_text(line)}" for line in last_lines] or ["  (no output)"]
        return DemoError("\n".join([problem, *shown]))


class DemoSandbox:
    """A temporary folder and the processes that run in it. `close` removes both."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hangwatch-demo-"))
        self._started: list[subprocess.Popen[bytes]] = []
        rings = self.folder / "run"
        temporary = self.folder / "tmp"
        make_private_folder(rings)
        make_private_folder(temporary)  # torchrun leaves folders behind
        self._mark = str(rings)
        kept = {k: v for k, v in env.items() if not k.startswith(_FOREIGN_PREFIXES)}
        self.env = kept | {
            MARK_VARIABLE: str(rings),
            "TMPDIR": str(temporary),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }

    def start_process(
        self, name: str, command: Sequence[str], **env: str
    ) -> subprocess.Popen[bytes]:
        """Starts a command in a session of its own. Its output is written to the files ``NAME.out``
        and ``NAME.err`` in the folder.
        """
        with (
            open(self.folder / f"{name}.out", "wb") as out,
            open(self.folder / f"{name}.err", "wb") as err,
        ):
            started = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.env | env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self._started.append(started)
        return started

    def read_lines(self, name: str) -> list[str]:
        """The lines of a file in the folder; none before it exists."""
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / name).read_text(errors="replace").splitlines()
        return []

    def close(self) -> None:
        """Ends every process: by SIGTERM, and after `TERMINATION_S` seconds by SIGKILL."""
        # A second Ctrl-C must not interrupt the clean-up, which takes a few seconds at most.
        with _handle_signals(signal.SIG_IGN, signal.SIGINT):
            self._signal_processes(signal.SIGTERM)
            kill_at = time.monotonic() + TERMINATION_S
            while self._find_processes() and time.monotonic() < kill_at + TERMINATION_S:
                if time.monotonic() > kill_at:
                    # Repeated, because a process may have forked in between.
                    self._signal_processes(signal.SIGKILL)
                time.sleep(0.05)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _find_processes(self) -> list[int]:
        """All processes that have the mark. Process groups would not do: the ranks are in sessions
        of their own, and the node agent is not a child of the demo.
        """
        found = []
        for path in Path("/proc").iterdir():
            if not path.name.isdigit() or int(path.name) == os.getpid():
                continue
            # The process may have exited, or belong to another user.
            with contextlib.suppress(OSError):
                environ = read_environ(int(path.name))
                if environ.get(MARK_VARIABLE) == self._mark:
                    found.append(int(path.name))
        for process in self._started:
            process.poll()  # no ended process is left as a zombie
        return found

    def _signal_processes(self, number: signal.Signals) -> None:
        for pid in self._find_processes():
            with contextlib.suppress(ProcessLookupError):  # the process has exited meanwhile
                os.kill(pid, number)


def names_planted_line(document: Document, file: str, line: int) -> bool:
    """Whether an incident blames the planted rank alone and has the planted line: its site, or a
    frame of its stacks.
    """
    if document.get("culprits") != [CULPRIT_RANK]:
        return False
    places = [document.get("site") or {}]
    for stack in get_parts(document, "stacks"):
        if stack.get("ranks") == [CULPRIT_RANK]:
            places += get_parts(stack, "frames")
    return any(
        Path(str(place.get("file", ""))).name == file and place.get("line") == line
        for place in places
    )
