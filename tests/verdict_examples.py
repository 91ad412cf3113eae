"""Writes the examples of the documentation, from real jobs, and README's table of kinds: ``python -m
tests.verdict_examples [KIND...]``.

For each kind, a program of tests/zoo runs under its launcher with a real server, and the output of
``hangwatch show`` is written to docs/examples/KIND.txt. Two kinds need two hosts, which are network
namespaces, and therefore root. One needs a GPU, or the stand-ins of tests/fakegpu: its example is
the output of ``hangwatch analyze`` for dumps that were taken there.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hangwatch.model.kinds import KINDS
from tests.harness import expected, hosts
from tests.harness.job import launch_job
from tests.harness.processes import clean_up_job
from tests.harness.server import Server, running_server
from tests.simulation.waiting import wait_until

PROJECT = Path(__file__).parents[1]
SCRIPT = Path("train.py")  # relative to the folder in which a job runs: verdicts show this name
EXAMPLES_DIR = PROJECT / "docs" / "examples"
KIND_TABLE_HEAD = "| kind | means | when |\n|---|---|---|\n"
STALL_AFTER_S = 4.0
START_S = 90.0  # the time to the fault, on a busy machine
VERDICT_S = 40.0
EVIDENCE_S = 4.0  # the time from the verdict to its stacks

PROGRAMS = {
    "mismatch": "another_op",
    "group_mismatch": "groups_in_another_order",
    "deadlock": "deadlock_two_groups",
    "dead_rank": "raises",
    "exited_rank": "out_of_data",
    "frozen_rank": "stopped",
    "startup_stall": "never_initialises",
    "missing_rank": "dataloader_stuck",
    "slow_rank": "slow_tokenizer",
    "quiet_job": "polls_for_file_of_stuck_rank",
    "concurrent_use": "two_threads_one_group",
    "replica_divergence": "flipped_bit",
    "nonfinite": "nan_in_a_batch",
}
DUMPS_DIR = PROJECT / "tests" / "fakegpu" / "dumps"
DUMPS = {"device_stuck": "torch-2.14.1/endless_kernel-timing"}
# The temporary folder of a job, whole or with its beginning cut off in a column of a table.
JOB_FOLDER = re.compile(r"\S*hangwatch-example-\w+/(?:job|host\d)/")
ELIDED_FOLDER = re.compile(r"…\S*/(?:job|host\d)/\S+")
TWO_HOST_KINDS = ("lost_node", "no_progress")
TWO_HOST_PROGRAM = PROJECT / "tests" / "integration" / "hosts_program.py"


def show_program(kind: str, folder: Path) -> str:
    """The verdict on the program of a kind, as a terminal shows it."""
    name = PROGRAMS[kind]
    program = expected.load_expected(name)
    source = expected.program_path(name).read_text()
    script = folder / "job" / SCRIPT
    script.parent.mkdir()
    script.write_text(source.replace(f"  {expected.PLANTED_MARK}", ""))
    with running_server(folder / "server", STALL_AFTER_S) as server:
        job = launch_job(
            SCRIPT,
            program.ranks,
            folder / "job",
            server.url,
            name="finetune",
            launcher=program.launcher,
            max_restarts=program.max_restarts,
        )
        try:
            if not wait_until(lambda: job.planted_at is not None, START_S):
                raise RuntimeError(f"{name} never came to its fault: {job.stderr}")
            return show_incident(server, kind)
        finally:
            clean_up_job(job.run_dir)
            job.process.wait()


def show_two_hosts(kind: str, folder: Path) -> str:
    """The verdict when a host is cut off (``lost_node``) or its network drops all packets."""
    with (
        hosts.create_network() as network,
        running_server(folder / "server", STALL_AFTER_S, network.server) as server,
    ):
        for host in ("host0", "host1"):
            (folder / host).mkdir()
            (folder / host / SCRIPT).write_text(TWO_HOST_PROGRAM.read_text())
        jobs = network.launch_jobs(SCRIPT, 2, folder, server.url, name="finetune")
        try:
            if not wait_until(lambda: count_recorded_ranks(server) == 4, START_S):
                raise RuntimeError("the job on two hosts made no calls")
            time.sleep(STALL_AFTER_S)
            if kind == "lost_node":
                network.cut_cables(1, hosts.DATA, hosts.SERVER)
            else:
                network.set_blackhole(True)
            return show_incident(server, kind)
        finally:
            for job in jobs:
                clean_up_job(job.run_dir, 0.0)
                job.process.wait()


def show_dumps(kind: str, folder: Path) -> str:
    """The verdict on Flight Recorder dumps, which are in ``folder`` meanwhile."""
    dumps = folder / "finetune"
    shutil.copytree(DUMPS_DIR / DUMPS[kind], dumps)
    command = [sys.executable, "-m", "hangwatch.agent.cli", "analyze", str(dumps)]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    if kind not in shown.stdout:
        raise RuntimeError(f"no {kind}: {shown.stdout}{shown.stderr}")
    return shown.stdout.replace("/job/faulty.py", str(SCRIPT))


def count_recorded_ranks(server: Server) -> int:
    """The ranks that have made a call in a process group."""
    return sum(any(g["entered"] for g in rank["groups"]) for rank in server.get_items("ranks"))


def show_incident(server: Server, kind: str) -> str:
    """What ``hangwatch show`` prints of the first incident of a kind."""

    def list_ids() -> list[str]:
        return [item["id"] for item in server.get_items("incidents") if item["kind"] == kind]

    if not wait_until(lambda: bool(list_ids()), VERDICT_S):
        raise RuntimeError(f"no {kind}: {server.get_items('incidents')}")
    time.sleep(EVIDENCE_S)
    command = [sys.executable, "-m", "hangwatch.agent.cli", "show", list_ids()[-1]]
    shown = subprocess.run(
        [*command, "--url", server.url], capture_output=True, text=True, check=True
    )
    return shown.stdout


def shorten_paths(text: str) -> str:
    """The text without the temporary folder; columns stay aligned."""

    def keep_width(match: re.Match[str]) -> str:
        return Path(match.group(0)).name.ljust(len(match.group(0)))

    text = ELIDED_FOLDER.sub(keep_width, JOB_FOLDER.sub("", text))
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def build_kind_table() -> str:
    """README's table of kinds."""
    rows = [
        f"| `{kind.value}` | {spec.meaning} | {spec.timing.value} |\n"
        for kind, spec in KINDS.items()
    ]
    return "".join([KIND_TABLE_HEAD, *rows])


def write_kind_table(readme: Path) -> None:
    """Replaces the table of kinds, which ends at the first empty line."""
    before, head, rest = readme.read_text(encoding="utf-8").partition(KIND_TABLE_HEAD)
    if not head:
        raise ValueError(f"{readme} has no table with the head {KIND_TABLE_HEAD!r}")
    _, end, after = rest.partition("\n\n")
    readme.write_text(before + build_kind_table().rstrip("\n") + end + after, encoding="utf-8")


def show_kind(kind: str, folder: Path) -> str:
    """The text of the example of a kind."""
    if kind in TWO_HOST_KINDS:
        return show_two_hosts(kind, folder)
    if kind in DUMPS:
        return show_dumps(kind, folder)
    return show_program(kind, folder)


def main() -> int:
    write_kind_table(PROJECT / "README.md")
    kinds = sys.argv[1:] or [*PROGRAMS, *DUMPS, *TWO_HOST_KINDS]
    EXAMPLES_DIR.mkdir(parents=True, exist_ok=True)
    failed = []
    for kind in kinds:
        with tempfile.TemporaryDirectory(prefix="hangwatch-example-") as folder:
            try:
                text = shorten_paths(show_kind(kind, Path(folder)))
            except (RuntimeError, subprocess.SubprocessError) as error:
                print(f"{kind}: {error}", file=sys.stderr)
                failed.append(kind)
                continue
        (EXAMPLES_DIR / f"{kind}.txt").write_text(text)
        print(f"{kind}: written", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
