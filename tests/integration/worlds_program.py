"""A trainer and an engine, each with a world of its own, and a group between their first ranks for the
weights: ``worlds_program.py healthy|stuck PORT [trainer|engine]``.

With a role, each world is a launch of its own. Otherwise the first half of one launch's ranks are the
trainer and the others the engine. If it is stuck, the engine's rank 0 does not take the weights.
"""

import os
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as _dist
import torch.distributed.distributed_c10d as _c10d

STEPS = 4
dist: Any = _dist
c10d: Any = _c10d


def init_world(role: str, port: int) -> tuple[str, int]:
    """(role, rank in the role's world)"""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if role:
        dist.init_process_group("gloo")
        return role, rank
    half = size // 2
    role, rank = ("trainer", rank) if rank < half else ("engine", rank - half)
    port += 1 if role == "trainer" else 2
    store = dist.TCPStore("127.0.0.1", port, half, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=half)
    return role, rank


def join_weights(role: str, port: int) -> Any:
    number = 0 if role == "trainer" else 1
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=number == 0)
    store = dist.PrefixStore("weights", store)
    group, _ = c10d._new_process_group_helper(
        2,
        number,
        [],
        dist.Backend("gloo"),
        store,
        group_name="weights",
        timeout=timedelta(minutes=10),
    )
    c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    return group


def wait_for_requests() -> None:
    open(os.environ["PLANTED_AT"], "a").close()
    threading.Event().wait()  # PLANTED


def main() -> None:
    behaviour, port, *roles = sys.argv[1:]
    role, rank = init_world(roles[0] if roles else "", int(port))
    group = join_weights(role, int(port)) if rank == 0 else None
    dist.barrier()
    for step in range(STEPS):
        for _ in range(20):
            dist.all_reduce(torch.ones(16))
        if role == "trainer" and rank == 0:
            end = time.monotonic() + 3.0
            while time.monotonic() < end:
                torch.ones(200, 200) @ torch.ones(200, 200)
        if role == "engine" and rank == 0 and step == 2 and behaviour == "stuck":
            wait_for_requests()
        if group is not None:
            dist.broadcast(torch.ones(1024), 0, group=group)
        if group is not None:
            dist.barrier(group=group)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
