"""Reduces until the file FINISH is there; rank STRAGGLER, if there is one, is 50 ms late each time."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

FINISH = Path(os.environ["FINISH"])
LATE = int(os.environ.get("STRAGGLER", "-1"))


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    everybody = dist.new_group(list(range(world)), group_desc='<img src=x onerror=alert(1)> & "dp"')
    x, stop = torch.ones(4096), torch.zeros(1)
    while not stop.item():
        time.sleep(0.01)
        if rank == LATE:
            time.sleep(0.05)
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=everybody)
        stop.fill_(float(FINISH.exists()))
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    dist.destroy_process_group()


main()
