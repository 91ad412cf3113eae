"""The work that `overhead` and `compare` time in turns, and `instructions` counts: tiny collectives,
or training steps under DDP or FSDP2.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import resource
import socket
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

Numbers = dict[str, float]

WARM_UP_CALLS = 5
# long enough for gloo's thread to fall asleep, as it does between the calls of a training
PAUSE_NS = 200_000
_libraries: list[Any] = []  # their kernels stay registered as long as they exist


def read_resident_mb() -> float:
    """Resident memory, what is shared with others (the ring) included."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def time_collectives(count: int, pause_ns: int) -> Numbers:
    """Nanoseconds of a one-element all-reduce as seen by its caller, with computation before each
    call.
    """
    tensor, times = torch.ones(1), []
    for _ in range(count):
        until = time.perf_counter_ns() + pause_ns
        while time.perf_counter_ns() < until:
            pass
        before = time.perf_counter_ns()
        dist.all_reduce(tensor)
        times.append(time.perf_counter_ns() - before)
    return {"call_ns": statistics.median(times[count // 10 :])}


def make_training(*, shard: bool = False) -> Callable[[int], Numbers]:
    """Seconds of a training step, with the CPU time of all threads. The model is small for its
    kind, so the step is short and the overhead shows. Medians, which a neighbour that takes the
    core or the cache for a while does not move as it moves a mean.
    """
    torch.manual_seed(0)
    torch.set_flush_denormal(
        True
    )  # else the last steps of a short training are slower than the first
    layers: list[nn.Module] = [nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU()]
    whole = nn.Sequential(*layers, *(nn.Linear(512, 512) for _ in range(6)), nn.Linear(512, 10))
    model = shard_model(whole) if shard else DistributedDataParallel(whole)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs, targets = torch.randn(64, 512), torch.randint(10, (64,))
    cpu: list[float] = []
    wall: list[float] = []
    traced = os.environ.get("BENCHMARK_UNDER") == "trace"
    if os.environ.get("BENCHMARK_UNDER") == "wrappers":
        wrap_functions()

    def train_steps(many: int) -> None:
        for _ in range(many):
            used, began = time.process_time(), time.perf_counter()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            cpu.append(time.process_time() - used)
            wall.append(time.perf_counter() - began)

    def time_steps(count: int) -> Numbers:
        cpu.clear()
        wall.clear()
        if traced:
            trace.Trace(count=0, trace=1).runfunc(train_steps, count + 1)
        else:
            train_steps(count + 1)
        return {
            "cpu_s": statistics.median(cpu[1:]),
            "wall_s": statistics.median(wall[1:]),
        }  # others have had the cache meanwhile

    return time_steps


def shard_model(model: nn.Sequential) -> nn.Module:
    """Applies FSDP2, with each linear layer as a shard group of its own."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def is_recorded_natively() -> bool:
    rank: Any = sys.modules.get("hangwatch.agent.recorder.installation")
    current = rank.current_rank if rank is not None else None
    return current is not None and current.recorder.native is not None


def count_flight_recorder_calls() -> int:
    """The number of calls in the buffer of PyTorch's Flight Recorder."""
    dump = getattr(
        torch._C._distributed_c10d, "_dump_fr_trace_json", None
    )  # older releases have none for gloo
    return len(json.loads(dump()).get("entries", ())) if dump is not None else 0


def wrap_functions() -> None:
    """Makes the functions that users typically trace print their tensors."""
    for module, names in (
        (dist, ("all_reduce", "broadcast", "all_gather", "barrier")),
        (nn.functional, ("linear", "relu", "batch_norm", "cross_entropy")),
    ):
        for name in names:
            setattr(module, name, print_results(getattr(module, name)))


def print_results(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` wrapped to print its tensor arguments and results."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        for value in (*args, *kwargs.values(), result):
            if isinstance(value, torch.Tensor):
                print(
                    function.__name__, tuple(value.shape), value.dtype, value.float().mean().item()
                )
        return result

    return wrapper


def init_nothing_backend() -> None:
    """Initializes a backend whose calls do nothing, so that only the overhead of calling remains. Not
    torch's "fake" backend by name: that simulates all ranks of a job in one process, and hangwatch
    excludes it.
    """
    from torch._C._distributed_c10d import FakeProcessGroup

    def create_group(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return FakeProcessGroup._create_internal(rank, size)

    dist.Backend.register_backend("nothing", create_group, devices=["cpu"])
    dist.init_process_group(
        "nothing", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=2
    )


def register_empty_kernel() -> None:
    """Registers a Python kernel for the all-reduce where hangwatch registers its own, which only
    passes the call on to the backend.
    """
    from torch._C import DispatchKey, _dispatch_keyset_full_after

    lower_keyset = _dispatch_keyset_full_after(DispatchKey.BackendSelect)
    redispatch = torch.ops.c10d.allreduce_.default._handle.redispatch_boxed
    lower: tuple[Any] | None = None

    def pass_on(keyset: Any, *args: Any) -> Any:
        nonlocal lower
        if lower is None:  # all calls here have the same keys
            lower = (keyset & lower_keyset,)
        return redispatch(*(lower + args))

    library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("allreduce_", pass_on, "BackendSelect", with_keyset=True)
    _libraries.append(library)


def count_instructions(work: Callable[[int], Numbers]) -> Callable[[int], Numbers]:
    """Wraps `work` to count its instructions and add its duration in seconds; see `instructions`."""
    marks = ctypes.CDLL(os.environ["BENCHMARK_MARKS"])

    def run_counted(count: int) -> Numbers:
        before = time.perf_counter()
        marks.begin()
        numbers = work(count)
        marks.end()
        return numbers | {"counted_s": time.perf_counter() - before}

    return run_counted


def serve_turns(work: Callable[[int], Numbers], count: int) -> None:
    """Runs ``work`` at each request and replies with its numbers; see `turns`."""
    work(WARM_UP_CALLS)
    if "BENCHMARK_MARKS" in os.environ:
        work = count_instructions(work)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ["BENCHMARK_TURNS"])
    with connection.makefile("rw") as line:
        print(json.dumps({"ready": True}), file=line, flush=True)
        while line.readline() == "go\n":
            print(json.dumps(work(count)), file=line, flush=True)
        final_numbers = {
            "resident_mb": read_resident_mb(),
            "native": is_recorded_natively(),
            "flight_recorder": count_flight_recorder_calls(),
        }
        print(json.dumps(final_numbers), file=line, flush=True)


def main() -> None:
    what, count = sys.argv[1], int(sys.argv[2])
    pause_ns = 0 if "BENCHMARK_MARKS" in os.environ else PAUSE_NS  # it would be counted
    if os.environ.get("BENCHMARK_UNDER") == "kernel":
        register_empty_kernel()
    if what == "calls":
        init_nothing_backend()
        serve_turns(lambda n: time_collectives(n, 0), count)
    else:
        dist.init_process_group("gloo")
        serve_turns(
            (
                (lambda n: time_collectives(n, pause_ns))
                if what == "gloo calls"
                else make_training(shard=what == "fsdp2 steps")
            ),
            count,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
