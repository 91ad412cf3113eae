"""How long `hangwatch analyze` takes on the dumps of a large job: ``python -m tests.benchmarks.dumps
[--ranks 1024] [--calls 2000]``.

The ranks are in tensor-parallel, data-parallel and default groups, and their rings have overwritten
old calls. One rank has skipped a call.
"""

from __future__ import annotations

import argparse
import json
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hangwatch.model.ranks import format_ranks

TENSOR_PARALLEL_SIZE = 8
STACK_DEPTH = 12  # frames of a stack
LIBRARY_FILE = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
SCRIPT_LINES = 40  # of the script, from which calls are made


def make_stacks() -> list[list[dict[str, Any]]]:
    """The stacks of all call sites: what they share is one object, as in torch's dumps."""
    outer = [{"name": f"f{n}", "filename": LIBRARY_FILE, "line": n} for n in range(STACK_DEPTH)]
    return [
        [*outer[:4], {"name": "step", "filename": "/home/me/train.py", "line": line}, *outer[4:]]
        for line in range(SCRIPT_LINES)
    ]


def make_dump(
    rank: int, ranks: int, calls: int, culprit: int, stacks: list[list[dict[str, Any]]]
) -> dict[str, Any]:
    first = rank // TENSOR_PARALLEL_SIZE * TENSOR_PARALLEL_SIZE
    groups = {
        "0": range(ranks),
        "1": range(first, first + TENSOR_PARALLEL_SIZE),
        "2": range(rank % TENSOR_PARALLEL_SIZE, ranks, TENSOR_PARALLEL_SIZE),
    }
    names = {"0": "default_pg", "1": "tp", "2": "dp"}
    entries, counts = [], dict.fromkeys(groups, 0)
    for number in range(2 * calls):  # half of which are overwritten
        group = "0" if number % 20 == 19 else "1" if number % 5 else "2"
        if rank == culprit and number == 2 * calls - 1:
            break
        counts[group] += 1
        if number < calls:
            continue
        size = 64 + number % 7
        last = number == 2 * calls - 1 and group == "0"
        entries.append(
            {
                "frames": stacks[number % SCRIPT_LINES], "record_id": number, "pg_id": int(group), "process_group": (group, names[group]),
                "thread_name": "python", "thread_id": "1", "collective_seq_id": counts[group], "p2p_seq_id": 0, "op_id": counts[group],
                "profiling_name": "nccl:all_reduce", "time_created_ns": 1_700_000_000_000_000_000 + number,
                "input_sizes": [[size, 8]], "input_dtypes": ["Float"], "output_sizes": [[size, 8]], "output_dtypes": ["Float"],
                "state": "scheduled" if last else "completed", "time_discovered_started_ns": None,
                "time_discovered_completed_ns": None if last else 1_700_000_000_000_000_000 + number, "retired": not last,
                "timeout_ms": 600_000, "is_p2p": False,
            }
        )  # fmt: skip
    config = {
        name: {"name": name, "desc": names[name], "ranks": str(list(members))}
        for name, members in groups.items()
    }
    status = {
        name: {"last_enqueued_collective": counts[name], "last_completed_collective": counts[name]}
        for name in groups
    }
    return {
        "version": "2.10",
        "pg_config": config,
        "comm_lib_version": "2.27.5",
        "pg_status": status,
        "entries": entries,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.dumps", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument("--ranks", type=int, default=1024, help="a multiple of 8 (1024)")
    parser.add_argument("--calls", type=int, default=2000, help="that a ring holds (2000)")
    arguments = parser.parse_args()
    outlier, stacks, size = arguments.ranks // 3, make_stacks(), 0
    with tempfile.TemporaryDirectory(prefix="hangwatch-dumps-") as folder:
        for rank in range(arguments.ranks):
            size += Path(folder, f"nccl_trace_rank_{rank}").write_bytes(
                pickle.dumps(
                    make_dump(rank, arguments.ranks, arguments.calls, outlier, stacks), protocol=2
                )
            )
        began = time.perf_counter()
        command = [
            sys.executable,
            "-P",
            "-c",
            "import sys; from hangwatch.agent.cli import main; sys.exit(main())",
            "analyze",
            "--json",
            folder,
        ]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        took, used = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    [incident] = json.loads(ran.stdout)["items"]
    print(
        f"{arguments.ranks:,} dumps of {arguments.calls:,} calls, {size / 1e6:,.0f} MB: {incident['kind']}, rank"
        f" {format_ranks(incident['culprits'])}"
    )
    print(
        f"{took:.1f} s, {used.ru_utime + used.ru_stime:.1f} s of CPU, {used.ru_maxrss / 1e3:,.0f}"
        " MB of memory"
    )
    return 0 if (incident["kind"], incident["culprits"]) == ("missing_rank", [outlier]) else 1


if __name__ == "__main__":
    sys.exit(main())
