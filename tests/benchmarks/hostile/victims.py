"""Real jobs that hang while the server is attacked: each must be reported as if nothing happened."""

from __future__ import annotations

import statistics
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from hangwatch.protocol.request_signing import derive_job_token
from tests.harness.server import Server
from tests.harness.verdicts import ProgramOutcome, check_program

INTERVAL_S = 30.0
PROGRAMS = ("another_op", "skips_collective", "killed", "out_of_data")


@dataclass(slots=True)
class HangingJobs:
    """Starts a job that hangs every `INTERVAL_S`, each with a token of its own, and one at a time."""

    server: Server
    folder: Path
    token: str
    outcomes: list[ProgramOutcome] = field(default_factory=list)
    thread: threading.Thread | None = None

    def start(self, ends_at: float) -> None:
        self.thread = threading.Thread(target=self._run, args=(ends_at,), daemon=True)
        self.thread.start()

    def _run(self, ends_at: float) -> None:
        while time.monotonic() < ends_at:
            started_at = time.monotonic()
            number = len(self.outcomes)
            folder = self.folder / f"victim-{number}"
            outcome = check_program(
                PROGRAMS[number % len(PROGRAMS)],
                folder,
                self.server.stall_after_s,
                env={"HANGWATCH_TOKEN": derive_job_token(self.token, folder.name)},
                use_server=lambda _: nullcontext(self.server),
            )
            self.outcomes.append(outcome)
            if not outcome.is_ok:  # how it came to that can only be seen now
                print(f"victim-{number}: {outcome}", file=sys.stderr, flush=True)
            time.sleep(max(0.0, min(ends_at, started_at + INTERVAL_S) - time.monotonic()))

    def list_problems(self) -> list[str]:
        return [
            f"{outcome.name}, {outcome.verdict}: {'; '.join(outcome.problems)}"
            for outcome in self.outcomes
            if not outcome.is_ok
        ]

    def describe(self) -> str:
        times_s = [o.verdict_after_s for o in self.outcomes if o.verdict_after_s is not None]
        if not times_s:
            return "no hang was reported"
        return (
            f"{len(times_s)} of {len(self.outcomes)} hangs reported:"
            f" median {statistics.median(times_s):.1f} s, slowest {max(times_s):.1f} s"
        )
