"""What traces and recordings on request cost a training: ``python -m tests.benchmarks.live [--rounds
N]``.

One DDP training on two ranks runs all the time; windows with nothing, with `hangwatch trace` and
with `hangwatch record` at 100 Hz alternate. The CPU time of a step, of all threads of the process,
is compared, because wall time depends on other load on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.harness.job import running_job
from tests.harness.processes import clean_environment, find_agents
from tests.harness.server import running_server
from tests.simulation.waiting import wait_until

from .turns import describe_machine

RANKS, WINDOW_S, COMMAND_START_S = 2, 8.0, 1.0
COMMAND = str(Path(sys.executable).with_name("hangwatch"))
INSPECTIONS = {
    "nothing": [],
    "trace": ["trace", "--rank", f"0-{RANKS - 1}", "--seconds", f"{WINDOW_S:g}", "--json"],
    "record": ["record", "--rank", "0", "--seconds", f"{WINDOW_S:.0f}", "--rate", "100"],
}
PROGRAM = """
import json, os, time
import torch, torch.distributed as dist
from torch import nn

torch.manual_seed(0)
torch.set_flush_denormal(True)
dist.init_process_group("gloo")
layers = [nn.Linear(512, 512), nn.ReLU()] * 4
model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers, nn.Linear(512, 10)))
optimizer = torch.optim.AdamW(model.parameters())
inputs, targets = torch.randn(64, 512), torch.randint(10, (64,))
with open(os.path.join(os.environ["BENCHMARK_OUT"], f"rank{dist.get_rank()}"), "w", buffering=1) as out:
    while True:
        began = time.process_time()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        out.write(json.dumps([time.time(), time.process_time() - began]) + "\\n")
"""


def read_agent_cpu_s(pid: int) -> float:
    """CPU seconds of a node agent and of the helpers of its that have ended."""
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, stat[11:15])) / os.sysconf("SC_CLK_TCK")


def read_step_times(path: Path, started_at: float, ended_at: float) -> list[float]:
    """CPU seconds of rank 0's steps between two moments."""
    samples = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("]")]
    return [cpu for at, cpu in samples if started_at <= at <= ended_at]


def run_benchmark(folder: Path, rounds: int) -> None:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    times_by_inspection: dict[str, list[float]] = {what: [] for what in INSPECTIONS}
    cores: dict[str, list[float]] = {what: [] for what in INSPECTIONS}
    env = {"BENCHMARK_OUT": str(folder)}
    with (
        running_server(folder / "server", stall_after_s=60) as server,
        running_job(program, RANKS, folder / "job", server.url, env=env) as job,
    ):
        if not wait_until(
            lambda: any((r["step"] or 0) > 50 for r in server.get_items("ranks", job="job")), 120
        ):
            raise TimeoutError(f"the job did not start: {job.stderr[-2000:]}")
        (agent,) = find_agents(job.run_dir)
        for turn in range(rounds):
            for what, command in [*INSPECTIONS.items()][turn % 3 :] + [*INSPECTIONS.items()][
                : turn % 3
            ]:
                inspection = subprocess.Popen(
                    [COMMAND, *command] if command else ["sleep", f"{WINDOW_S:g}"], cwd=folder, stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL, env=clean_environment(HANGWATCH_URL=server.url),
                )  # fmt: skip
                time.sleep(
                    COMMAND_START_S
                )  # the command itself, and py-spy, take their time to start
                used, began = read_agent_cpu_s(agent), time.time()
                time.sleep(WINDOW_S - COMMAND_START_S)
                ended = time.time()
                if inspection.wait(60):
                    raise RuntimeError(f"hangwatch {' '.join(command)} failed")
                cores[what].append((read_agent_cpu_s(agent) - used) / (time.time() - began))
                times_by_inspection[what].append(
                    statistics.median(read_step_times(folder / "rank0", began, ended))
                )
    bare = times_by_inspection["nothing"]
    print(f"{'':<10} {'step, CPU':>12} {'added':>9} {'node agent, with py-spy':>25}")
    for what, cpu in times_by_inspection.items():
        added = statistics.median(c / b - 1 for c, b in zip(cpu, bare, strict=True))
        core = 100 * statistics.median(cores[what])
        print(
            f"{what:<10} {1e3 * statistics.median(cpu):>9.2f} ms {100 * added:>+7.1f} %"
            f" {core:>18.1f} % of a core"
        )
    middle = statistics.median(bare)
    print(
        f"nothing against itself: {100 * (min(bare) / middle - 1):+.1f} to"
        f" {100 * (max(bare) / middle - 1):+.1f} %"
    )
    print(
        f"\nMedians over {rounds} rounds of windows of {WINDOW_S:g} s that take turns in one"
        " training."
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.live",
        description="What inspecting a rank costs its training.",
    )
    parser.add_argument(
        "--rounds", type=int, default=6, help="each takes half a minute (default: %(default)s)"
    )
    rounds = parser.parse_args().rounds
    print(*describe_machine(), "", sep="\n")
    with tempfile.TemporaryDirectory(prefix="hangwatch-live-") as folder:
        run_benchmark(Path(folder), rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
