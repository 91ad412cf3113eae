"""Plants one fault on a job that does all_reduce in a loop: `faulty.py CASE`. Written to be watched while it hangs.

Rank 1 is faulty where only one is. Each step reduces over the world and then over the rank's half.
With FAKEGPU_REPORT a thread writes torch's `pg_status` of this rank to REPORT.RANK.json after FAKEGPU_REPORT_AFTER_S.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

RANK = int(os.environ["RANK"])
SIZE = int(os.environ["WORLD_SIZE"])
FAULT_STEP = 5
TIMEOUT_S = float(os.environ.get("NCCL_TIMEOUT_S", "600"))
STATE = {"host": "starting"}


def load_control() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "control.py"
    specification = importlib.util.spec_from_file_location("fakegpu_control", path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


control = load_control()


def report_later() -> None:
    target = os.environ.get("FAKEGPU_REPORT")
    if not target:
        return

    def report() -> None:
        time.sleep(float(os.environ.get("FAKEGPU_REPORT_AFTER_S", "6")))
        # Only in CUDA builds, so a type checker over a CPU build does not know it.
        dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json")  # noqa: B009
        text = dump(includeCollectives=False)
        entries = dump(includeCollectives=True)
        status = json.loads(text)
        status["host"] = STATE["host"]
        states = [
            (e["collective_seq_id"], e["process_group"][1], e["state"])
            for e in json.loads(entries).get("entries", [])
        ]
        status["last_entries"] = states[-4:]
        Path(f"{target}.{RANK}.json").write_text(json.dumps(status, indent=1))
        if os.environ.get("FAKEGPU_EXIT_AFTER_REPORT") == "1":
            time.sleep(2)  # the others have time to write theirs
            os._exit(0)

    threading.Thread(target=report, daemon=True).start()


def plant_endless_kernel() -> None:
    if RANK == 1:
        control.launch_endless_kernel()


def plant_endless_wait() -> None:
    if RANK == 1:
        control.wait_for_unrecorded_event()


def plant_stall() -> None:
    control.stall_collectives()


def plant_stall_one() -> None:
    if RANK == 1:
        control.stall_collectives()


def plant_vanish() -> None:
    if RANK == 1:
        os.kill(os.getpid(), 9)


def plant_async_error() -> None:
    control.plant("stall")
    control.raise_async_error(6)


def plant_skip() -> None:
    if RANK == 1:
        STATE["host"] = "sleep"
        time.sleep(3600)


def plant_mismatch() -> None:
    if RANK == 1:
        dist.all_reduce(torch.ones(7).to("cuda"))


def plant_out_of_memory() -> None:
    if RANK == 1:
        control.refuse_allocations()
        torch.empty(1 << 28, device="cuda")


def plant_nothing() -> None:
    return


CASES: dict[str, Callable[[], None]] = {
    name.removeprefix("plant_"): function
    for name, function in list(globals().items())
    if name.startswith("plant_")
}


def main() -> None:
    case = sys.argv[1]
    is_running_ahead = os.environ.get("RUN_AHEAD") == "1"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timedelta(seconds=TIMEOUT_S))
    halves = [dist.new_group(range(SIZE // 2)), dist.new_group(range(SIZE // 2, SIZE))]
    half = halves[RANK * 2 // SIZE]
    report_later()
    tensor = torch.ones(64).to("cuda")
    for step in range(200):
        if step == FAULT_STEP:
            CASES[case]()
        for group in (None, half):
            STATE["host"] = f"step {step}: all_reduce"
            dist.all_reduce(tensor, group=group)
        if step <= FAULT_STEP - 1 or not is_running_ahead:
            STATE["host"] = f"step {step}: synchronize"
            torch.cuda.synchronize()
        if step > FAULT_STEP + 3 and case == "nothing":
            break
    STATE["host"] = "last synchronize"
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
