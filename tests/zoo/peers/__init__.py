"""The same programs under PyTorch's own tools: its Flight Recorder with its analyzer, and
TORCH_DISTRIBUTED_DEBUG=DETAIL.

No hangwatch runs beside them; `hangwatch analyze` may read what the Flight Recorder left. A hang
counts as named right if the tool names exactly the culprits, whatever kind of fault it reports. If
it names no rank, the rank that the launcher reports to have ended first counts as its answer. The
tools are scored as torch ships them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.harness import expected as programs
from tests.harness.depth import NO_EARLIER_CALLS, Depth
from tests.harness.expected import ExpectedVerdict
from tests.harness.job import LaunchedJob, launch_job
from tests.harness.processes import clean_environment, clean_up_job
from tests.harness.verdicts import HEALTHY_S, START_S, ProgramOutcome
from tests.simulation.waiting import wait_until
from tests.zoo.peers import reading

GROUP_TIMEOUT_S = 10.0  # of the process groups under DETAIL, which reports when it expires
DUMP_GRACE_S = 5.0
SITE_DIR = Path(__file__).with_name("site")

AccusedRanks = tuple[int, ...]


def check_with_peer(
    peer: str,
    name: str,
    folder: Path,
    stall_after_s: float,
    depth: Depth = NO_EARLIER_CALLS,
) -> ProgramOutcome:
    """Runs the program `name` under `peer`, one of PEERS; everything it writes goes to `folder`."""
    expected, outcome = programs.load_expected(name), ProgramOutcome(name=name)
    outcome.earlier_calls = depth.calls
    job = launch_job(
        programs.program_path(name),
        expected.ranks,
        folder,
        None,
        name=name,
        env={"PYTHONPATH": str(SITE_DIR), **depth.env, **PEERS[peer].env(folder)},
        launcher=expected.launcher,
        max_restarts=expected.max_restarts,
    )
    try:
        if expected.healthy:
            _watch_healthy(expected, job, outcome)
        elif (
            not wait_until(lambda: job.planted_at is not None, START_S)
            or (fault := job.planted_at) is None
        ):
            outcome.problems.append(
                f"the program never came to its fault (exit status {job.process.poll()})"
            )
        else:
            accused, accused_at = PEERS[peer].watch(expected, job, stall_after_s, outcome)
            if not accused and (accused := reading.parse_launcher(job.stderr)):
                accused_at = (job.folder / "stderr").stat().st_mtime
                outcome.verdict = f"launcher {list(accused)}"
            elif accused:
                outcome.verdict = str(list(accused))
            _judge_outcome(expected, outcome, accused, accused_at - fault)
    finally:
        clean_up_job(job.run_dir, 0.0)
        job.process.wait()
    outcome.log += "\n--- ".join([job.stdout, job.stderr])
    return outcome


def _judge_outcome(
    expected: ExpectedVerdict, outcome: ProgramOutcome, named: AccusedRanks, verdict_after_s: float
) -> None:
    if named:
        outcome.incidents = [{"kind": expected.kind, "culprits": list(named), "severity": "alert"}]
    if named == expected.culprits:
        outcome.verdict_after_s = verdict_after_s
    else:
        outcome.problems.append(f"named {list(named)}, not {list(expected.culprits)}")


def _watch_healthy(expected: ExpectedVerdict, job: LaunchedJob, outcome: ProgramOutcome) -> None:
    """Checks that a healthy job ends and that no rank is accused."""
    wait_until(
        lambda: (
            job.process.poll() is not None or (expected.interrupt and job.planted_at is not None)
        ),
        HEALTHY_S,
    )
    if expected.interrupt and job.planted_at is not None:
        os.killpg(job.process.pid, signal.SIGINT)
        wait_until(lambda: job.process.poll() is not None, HEALTHY_S)
    status, accused = job.process.poll(), reading.parse_detail(job.stderr)
    if status is None:
        outcome.problems.append(f"the job did not end within {HEALTHY_S:g} s")
    elif expected.interrupt != (status != 0):
        outcome.problems.append(f"the job's exit status is {status}")
    if accused:
        outcome.verdict = str(list(accused))
        outcome.incidents = [{"kind": "healthy", "culprits": list(accused), "severity": "alert"}]
        outcome.problems.append(f"ranks {list(accused)} of a healthy job are accused")


def _recorder_env(folder: Path) -> dict[str, str]:
    dumps = folder / "dumps"
    dumps.mkdir(parents=True)
    return {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": str(dumps / "rank_"),
        "PEER_DUMP_WHEN": str(folder / "dump-now"),
    }


def _collect_dumps(expected: ExpectedVerdict, job: LaunchedJob, stall_after_s: float) -> Path:
    """Waits until the hang is `stall_after_s` seconds old, as hangwatch does, and requests dumps from
    all ranks. Returns their folder.
    """
    assert job.planted_at is not None
    time.sleep(max(0.0, job.planted_at + stall_after_s - time.time()))
    (job.folder / "dump-now").touch()
    dumps = job.folder / "dumps"
    wait_until(
        lambda: len(list(dumps.glob("rank_*"))) == expected.ranks or job.process.poll() is not None,
        DUMP_GRACE_S,
    )
    return dumps


def _watch_dumps(
    analyzer: tuple[str, ...],
    read: Callable[[str, str], AccusedRanks],
    expected: ExpectedVerdict,
    job: LaunchedJob,
    stall_after_s: float,
    outcome: ProgramOutcome,
) -> tuple[AccusedRanks, float]:
    """Runs the module ``analyzer``, with its arguments, on the dumps; ``read`` finds the ranks that
    its stdout and stderr accuse.
    """
    command = (sys.executable, "-m", *analyzer, str(_collect_dumps(expected, job, stall_after_s)))
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120.0,
        env=clean_environment(),
        cwd=job.folder,
    )
    outcome.log = f"{ran.stdout}{ran.stderr}\n--- "
    outcome.verdict = (ran.stderr.strip().splitlines() or ["none"])[-1][:32]
    return read(ran.stdout, ran.stderr), time.time()


def _watch_detail(
    expected: ExpectedVerdict, job: LaunchedJob, stall_after_s: float, outcome: ProgramOutcome
) -> tuple[AccusedRanks, float]:
    """Reads what the ranks print until the job has ended or timed out. Returns the ranks that they
    name last, and since when they name these.
    """
    assert job.planted_at is not None
    named: AccusedRanks = ()
    since, over = job.planted_at, False
    while not over:
        over = (
            job.process.poll() is not None
            or time.time() > job.planted_at + GROUP_TIMEOUT_S + DUMP_GRACE_S
        )
        now = reading.parse_detail(job.stderr)
        if now != named:
            named, since = now, time.time()
        time.sleep(0.1)
    return named, since


def _detail_env(folder: Path) -> dict[str, str]:
    return {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "PEER_TIMEOUT_S": str(GROUP_TIMEOUT_S)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTool:
    """``env`` is what its jobs need, given their folder; ``watch`` returns the ranks that it names
    after the fault, and when it did.
    """

    env: Callable[[Path], dict[str, str]]
    watch: Callable[
        [ExpectedVerdict, LaunchedJob, float, ProgramOutcome], tuple[AccusedRanks, float]
    ]


_FR_TRACE = ("torch.distributed.flight_recorder.fr_trace", "--prefix", "rank_")
_ANALYZE = ("hangwatch.agent.cli", "analyze", "--json")
PEERS = {
    "flight-recorder": PeerTool(
        env=_recorder_env,
        watch=partial(_watch_dumps, _FR_TRACE, lambda out, err: reading.parse_analyzer(out + err)),
    ),
    "analyze": PeerTool(
        env=_recorder_env,
        watch=partial(_watch_dumps, _ANALYZE, lambda out, err: reading.parse_hangwatch(out)),
    ),
    "detail": PeerTool(env=_detail_env, watch=_watch_detail),
}
