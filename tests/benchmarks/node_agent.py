"""What the node agent of a host with 8 ranks costs, and how fast it dumps their stacks: ``python -m
tests.benchmarks.node_agent``.

A real job of 8 ranks on gloo makes twenty calls a second. CPU time and memory are those of the node
agent and its helper processes. The host seems to have 8 InfiniBand ports and 8 GPUs, which are read
once a minute, as the other sources of hardware evidence are.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.harness import job, processes
from tests.harness.nvml_shim import build_nvml_shim, write_driver
from tests.harness.server import Server, running_server
from tests.simulation.waiting import wait_until

from .dashboard import check_limit
from .process_cost import list_family, read_family_cpu_s

RANKS, MEASURE_S, DUMPS = 8, 65.0, 3  # at least one reading of the hardware
SETTLE_S = 12.0  # after a process starts, more are expected and looked for more often
MAX_CORE_PERCENT, MAX_READING_PERCENT, MAX_MB, MAX_DUMP_S = 1.0, 0.5, 60.0, 2.0
PROGRAM = """
import time
import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
tensor = torch.ones(64)
while True:
    dist.all_reduce(tensor)
    time.sleep(0.05)
"""

# Prints the seconds of CPU of one reading, that of the process for sources that may block included, but
# not its start, which is the first reading's.
READINGS = """
import os, threading, time
from hangwatch.agent.node.hardware.monitor import HardwareMonitor, HardwareOrder
from hangwatch.protocol.commands import Command, CommandKind
from tests.benchmarks.process_cost import read_family_cpu_s
woken = threading.Event()
monitor = HardwareMonitor(woken.set)
def read():
    woken.clear()
    command = Command(id="r", kind=CommandKind.HARDWARE, key="k")
    assert monitor.submit_order(HardwareOrder(pids=(os.getpid(),), command=command))
    assert woken.wait(30)
read()
before, count = read_family_cpu_s(os.getpid()), 20
for _ in range(count):
    read()
print((read_family_cpu_s(os.getpid()) - before) / count)
"""


def read_family_mb(pid: int) -> float:
    """The memory of a process and its children now; pages that they share count once."""
    rollups = (Path(f"/proc/{one}/smaps_rollup").read_text() for one in list_family(pid))
    return sum(int(rollup.partition("Pss:")[2].split()[0]) for rollup in rollups) / 1024


def make_host(root: Path) -> dict[str, str]:
    """Files and libraries of the host's adapters and GPUs, and the variables that make them known."""
    write_driver(root)
    for number in range(RANKS):
        port = root / f"sys/class/infiniband/mlx5_{number}/ports/1"
        for folder in ("counters", "hw_counters"):
            (port / folder).mkdir(parents=True)
        (port / "state").write_text("4: ACTIVE\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
        for name in ("link_downed", "symbol_error", "port_rcv_errors", "port_xmit_discards"):
            (port / "counters" / name).write_text("0\n")
        for name in ("out_of_sequence", "local_ack_timeout_err", "roce_adp_retrans"):
            (port / "hw_counters" / name).write_text("0\n")
    return {
        "HANGWATCH_HOST_ROOT": str(root),
        "LD_LIBRARY_PATH": str(build_nvml_shim(root / "lib")),
        "FAKE_NVML_GPUS": str(RANKS),
    }


def measure_reading_percent(env: dict[str, str]) -> float:
    """The share of a core that one reading of all sources a minute takes; a baseline reads fewer."""
    done = subprocess.run(
        [sys.executable, "-c", READINGS],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=True,
    )
    return 100 * float(done.stdout) / 60.0


def measure_dump_s(server: Server) -> float:
    """Seconds from asking for the stacks of all ranks to having them. Raises RuntimeError where one
    cannot be had.
    """
    began = time.monotonic()
    dump = server.post("dumps", {"job": "job", "ranks": list(range(RANKS)), "native": False})
    while dump["status"] == "pending":
        time.sleep(0.02)
        dump = server.get(f"dumps/{dump['id']}")
    if failed := [rank["error"] for rank in dump["ranks"] if rank["status"] != "done"]:
        raise RuntimeError(failed[0])
    return time.monotonic() - began


def run_benchmark(folder: Path) -> bool:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    with (
        running_server(folder / "server", stall_after_s=60) as server,
        job.running_job(
            program, RANKS, folder / "job", server.url, env=make_host(folder / "host")
        ) as running,
    ):
        if not wait_until(
            lambda: (
                bool(jobs := server.get_items("jobs")) and jobs[0]["states"].get("running") == RANKS
            ),
            120,
        ):
            raise TimeoutError(f"the job did not start: {running.stderr}")
        time.sleep(SETTLE_S)
        (agent,) = processes.find_agents(running.run_dir)
        used, began = read_family_cpu_s(agent), time.monotonic()
        time.sleep(MEASURE_S)
        core = (read_family_cpu_s(agent) - used) / (time.monotonic() - began)
        good = check_limit("the node agent takes", 100 * core, "%", MAX_CORE_PERCENT)
        reading = measure_reading_percent(make_host(folder / "second-host"))
        good &= check_limit(
            "of that, all sources of hardware evidence, at most", reading, "%", MAX_READING_PERCENT
        )
        took = sorted(measure_dump_s(server) for _ in range(DUMPS))
        good &= check_limit(
            f"stacks of all {RANKS} ranks are there after (median of {DUMPS})",
            took[DUMPS // 2],
            "s",
            MAX_DUMP_S,
        )
        return good & check_limit(
            "its memory and that of its helpers", read_family_mb(agent), "MB", MAX_MB
        )


def main() -> int:
    argparse.ArgumentParser(
        prog="python -m tests.benchmarks.node_agent", description=(__doc__ or "").partition(":")[0]
    ).parse_args()
    with tempfile.TemporaryDirectory(prefix="hangwatch-agent-") as folder:
        return 0 if run_benchmark(Path(folder)) else 1


if __name__ == "__main__":
    sys.exit(main())
