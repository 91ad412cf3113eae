"""What one NCCL call costs its thread, in turns of CALLS calls each: `call_cost.py TURNS CALLS`, on one rank.

Prints {"call_ns": […], "status_ns": […], "dump_ns": […]}: by turn; of reading the Flight Recorder's counters; of reading
its recorded calls as well. The last two are empty where it is off.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

STATUS_READINGS, DUMP_READINGS = 100, 5
GROUPS = 8  # the counters of these are read


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


def time_readings(read: Callable[[], object], count: int) -> list[float]:
    times = []
    for _ in range(count):
        began = time.perf_counter_ns()
        read()
        times.append(float(time.perf_counter_ns() - began))
    return times


def main() -> None:
    turns, calls = map(int, sys.argv[1:])
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    tensor = torch.ones(64).to("cuda")
    for _ in range(GROUPS - 1):
        dist.all_reduce(tensor, group=dist.new_group([0]))
    time_turns(3, calls)
    call_ns = time_turns(turns, calls)
    # Only in CUDA builds, so a type checker over a CPU build does not know it.
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json")  # noqa: B009
    status_ns, dump_ns = [], []
    if json.loads(dump(includeCollectives=False))["pg_status"]:
        status_ns = time_readings(lambda: dump(includeCollectives=False), STATUS_READINGS)
        dump_ns = time_readings(lambda: dump(includeCollectives=True), DUMP_READINGS)
    print(json.dumps({"call_ns": call_ns, "status_ns": status_ns, "dump_ns": dump_ns}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
