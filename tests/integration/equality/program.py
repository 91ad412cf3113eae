"""Runs the aspects that ASPECTS names, one after the other, and writes what they return to
REPORT_DIR/RANK.json.
"""

import json
import os
import traceback

import calls  # noqa: F401
import compilation  # noqa: F401
import lifetimes  # noqa: F401
import process  # noqa: F401
import tensors  # noqa: F401
import torch.distributed as dist
from registry import ASPECTS


def main():
    dist.init_process_group("gloo")
    report = {}
    for name in os.environ["ASPECTS"].split(","):
        dist.barrier()
        if dist.get_rank() == 0:
            print("aspect", name, flush=True)
        try:
            report[name] = ASPECTS[name]()
        except Exception:
            report[name] = {"failed": traceback.format_exc()}
    with open(f"{os.environ['REPORT_DIR']}/{dist.get_rank()}.json", "w") as file:
        json.dump(report, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
