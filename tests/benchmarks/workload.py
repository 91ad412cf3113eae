"""What `overhead` and `compare` run and time: tiny collectives, or training steps under DDP or FSDP2.

Each rank leaves its numbers in a file of its own.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import statistics
import sys
import time
import trace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

WARM_UP = 5
PAUSE_NS = 200_000  # long enough for gloo's thread to fall asleep, as it does between the calls of a training


def resident_mb() -> float:
    """Resident memory, what is shared with others (the ring) included."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def collectives(count: int, pause_ns: int) -> dict[str, float]:
    """Nanoseconds of a one-element all-reduce, as its caller sees it, with something to compute before each."""
    x, times = torch.ones(1), []
    for _ in range(count):
        until = time.perf_counter_ns() + pause_ns
        while time.perf_counter_ns() < until:
            pass
        before = time.perf_counter_ns()
        dist.all_reduce(x)
        times.append(time.perf_counter_ns() - before)
    times = sorted(times[count // 10 :])
    return {"call_ns": times[len(times) // 2]}


def steps(count: int, *, shard: bool = False) -> dict[str, float]:
    """Seconds of a training step, with the CPU time of all threads. The model is small for its kind, so the step is short and the
    overhead shows. Medians, which a neighbour that takes the core or the cache for a while does not move as it moves a mean.
    """
    torch.manual_seed(0)
    torch.set_flush_denormal(True)  # else the last steps of a short training are slower than the first
    layers: list[nn.Module] = [nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU()]
    whole = nn.Sequential(*layers, *(nn.Linear(512, 512) for _ in range(6)), nn.Linear(512, 10))
    model = sharded(whole) if shard else DistributedDataParallel(whole)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs, targets = torch.randn(64, 512), torch.randint(10, (64,))

    def train(many: int) -> None:
        for _ in range(many):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    cpu: list[float] = []
    wall: list[float] = []

    def timed(many: int) -> None:
        for _ in range(many):
            used, began = time.process_time(), time.perf_counter()
            train(1)
            cpu.append(time.process_time() - used)
            wall.append(time.perf_counter() - began)

    train(WARM_UP)
    dist.barrier()
    under(os.environ.get("BENCHMARK_UNDER", ""), timed, count)
    return {"cpu_s": statistics.median(cpu), "wall_s": statistics.median(wall)}


def sharded(model: nn.Sequential) -> nn.Module:
    """Under FSDP2, each of its linear layers for itself."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def recorded_natively() -> bool:
    rank: Any = sys.modules.get("hangwatch.agent.recorder.rank")
    current = rank.current() if rank is not None else None
    return current is not None and current.recorder.native is not None


def under(what: str, train: Callable[[int], None], count: int) -> None:
    """Trains as it is, under Python's own tracer, or with wrappers that print."""
    if what == "trace":
        trace.Trace(count=0, trace=1).runfunc(train, count)
    elif what == "wrappers":
        for module, names in (
            (dist, ("all_reduce", "broadcast", "all_gather", "barrier")),
            (nn.functional, ("linear", "relu", "batch_norm", "cross_entropy")),
        ):
            for name in names:
                setattr(module, name, printing(getattr(module, name)))
        train(count)
    else:
        train(count)


def printing(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, with what it is given and what it returns printed."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        for value in (*args, *kwargs.values(), result):
            if isinstance(value, torch.Tensor):
                print(function.__name__, tuple(value.shape), value.dtype, value.float().mean().item())
        return result

    return wrapper


def start_nothing() -> None:
    """A backend whose calls do nothing, so that what is left is the way there. Not torch's own "fake" by name: that plays all ranks
    of a job in one process, and hangwatch leaves it out.
    """
    from torch._C._distributed_c10d import FakeProcessGroup

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return FakeProcessGroup._create_internal(rank, size)

    dist.Backend.register_backend("nothing", create, devices=["cpu"])
    dist.init_process_group("nothing", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=2)


def main() -> None:
    what, count = sys.argv[1], int(sys.argv[2])
    if what == "calls":
        start_nothing()
        numbers = collectives(count, 0)
    else:
        dist.init_process_group("gloo")
        numbers = collectives(count, PAUSE_NS) if what == "gloo calls" else steps(count, shard=what == "fsdp2 steps")
    numbers |= {"resident_mb": resident_mb(), "native": recorded_natively()}
    Path(os.environ["BENCHMARK_OUT"], f"rank{dist.get_rank()}.json").write_text(json.dumps(numbers))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
