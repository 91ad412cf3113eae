"""The real job of `soak`: makes small steps while its first file exists; rank 1 waits while its
second file exists.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def wait_while_held(hold_file: Path) -> None:
    while hold_file.exists():
        time.sleep(0.5)


def main() -> None:
    continue_file, hold_file = Path(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo")
    more = torch.ones(64)
    while more.min() > 0:  # the same for both
        if dist.get_rank() == 1 and hold_file.exists():
            wait_while_held(hold_file)
        more.fill_(continue_file.exists())
        dist.all_reduce(more, op=dist.ReduceOp.MIN)
        time.sleep(0.05)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
