"""What one NCCL call costs its thread, in turns of CALLS calls each: `call_cost.py TURNS CALLS`, on two ranks.

Rank 0 prints {"call_ns": […], "graph_ns": […], "status_ns": […], "dump_ns": […]}: a call, and the replay of a CUDA graph with
200 of them, by turn; reading the Flight Recorder's counters; reading its recorded calls as well. The last two are empty
where it is off.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

STATUS_READINGS, DUMP_READINGS = 100, 5
GROUPS = 8  # the counters of these are read
GRAPH_CALLS, GRAPH_REPLAYS = 200, 10  # in a graph; of it in a turn


def time_turns(turns: int, calls: int) -> list[float]:
    """Nanoseconds of a call, the median of each turn. The device is waited for between turns."""
    tensor = torch.ones(64).to("cuda")
    result = []
    for _ in range(turns):
        times = []
        for _ in range(calls):
            began = time.perf_counter_ns()
            dist.all_reduce(tensor, async_op=True)
            times.append(time.perf_counter_ns() - began)
        torch.cuda.synchronize()
        result.append(float(sorted(times)[calls // 2]))
    return result


def time_replays(turns: int) -> list[float]:
    """Nanoseconds that a replay takes the host, the median of each turn."""
    tensor = torch.ones(64).to("cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_CALLS):
            dist.all_reduce(tensor)
    result = []
    for _ in range(turns):
        times = []
        for _ in range(GRAPH_REPLAYS):
            began = time.perf_counter_ns()
            graph.replay()
            times.append(time.perf_counter_ns() - began)
            torch.cuda.synchronize()
        result.append(float(sorted(times)[GRAPH_REPLAYS // 2]))
    return result


def time_readings(read: Callable[[], object], count: int) -> list[float]:
    times = []
    for _ in range(count):
        began = time.perf_counter_ns()
        read()
        times.append(float(time.perf_counter_ns() - began))
    return times


def main() -> None:
    turns, calls = map(int, sys.argv[1:])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    tensor = torch.ones(64).to("cuda")
    for _ in range(GROUPS - 1):
        dist.all_reduce(tensor, group=dist.new_group())
    time_turns(3, calls)
    call_ns = time_turns(turns, calls)
    graph_ns = time_replays(turns)
    # Only in CUDA builds, so a type checker over a CPU build does not know it.
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json")  # noqa: B009
    status_ns, dump_ns = [], []
    if json.loads(dump(includeCollectives=False))["pg_status"]:
        status_ns = time_readings(lambda: dump(includeCollectives=False), STATUS_READINGS)
        dump_ns = time_readings(lambda: dump(includeCollectives=True), DUMP_READINGS)
    if dist.get_rank() == 0:
        figures = {
            "call_ns": call_ns,
            "graph_ns": graph_ns,
            "status_ns": status_ns,
            "dump_ns": dump_ns,
        }
        print(json.dumps(figures))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
