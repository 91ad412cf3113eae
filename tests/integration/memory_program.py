"""Trains, until rank 1 puts itself into the cgroup that MEMORY_CGROUP names and takes more memory than
that allows.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist


def take_memory() -> None:
    Path(os.environ["MEMORY_CGROUP"], "cgroup.procs").write_text(str(os.getpid()))
    open(os.environ["PLANTED_AT"], "a").close()
    kept = []
    while True:
        kept.append(bytearray(os.urandom(1 << 20)))


def main() -> None:
    dist.init_process_group("gloo")
    for step in range(1000):
        if dist.get_rank() == 1 and step == 20:
            take_memory()
        dist.all_reduce(torch.ones(64))
        time.sleep(0.05)


if __name__ == "__main__":
    main()
