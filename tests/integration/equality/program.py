"""Runs the aspects that ASPECTS names, one after the other, and writes what they return to
REPORT_DIR/RANK.json. What a rank writes to its stdout and stderr goes to REPORT_DIR/RANK.out. An aspect
that raises ends the job: it compared nothing, and the other rank would wait for its collectives.
"""

import json
import os

import calls  # noqa: F401
import compilation  # noqa: F401
import lifetimes  # noqa: F401
import process  # noqa: F401
import tensors  # noqa: F401
import torch.distributed as dist
from registry import ASPECTS


def redirect_output(path):
    """Two ranks that share a file mix their lines, as C++ writes a line in pieces."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)


def main():
    redirect_output(f"{os.environ['REPORT_DIR']}/{os.environ['RANK']}.out")
    dist.init_process_group("gloo")
    report = {}
    for name in os.environ["ASPECTS"].split(","):
        dist.barrier()
        print("aspect", name, flush=True)
        report[name] = ASPECTS[name]()
    with open(f"{os.environ['REPORT_DIR']}/{dist.get_rank()}.json", "w") as file:
        json.dump(report, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
