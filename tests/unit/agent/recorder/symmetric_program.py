"""Calls operators on symmetric memory, for which there are no kernels on the CPU, with kernels of its
own. Prints as JSON what came of it and, with a recorder (argument 1: ``native``, ``python`` or
``none``), what the ring in the folder of argument 2 has of it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from hangwatch.agent.recorder import dynamo, faults, kernels
from hangwatch.agent.recorder.native.library import choose_recorder
from hangwatch.agent.recorder.recorder import Recorder
from hangwatch.agent.recorder.writer import RingWriter
from hangwatch.ring.reader import RingReader

MODULE = "torch.distributed._symmetric_memory"
symm_mem = torch.ops.symm_mem
library: Any = torch.library.Library("symm_mem", "IMPL")  # type: ignore[no-untyped-call]


def start_recorder(kind: str, folder: Path) -> Recorder | None:
    if kind == "none":
        return None
    ring = RingWriter(folder / "a.ring", pid=os.getpid(), start_ticks=1)
    ring.write_identity({"rank": 0})
    native, reason = choose_recorder({**os.environ, "HANGWATCH_RECORDER": kind})
    assert (native is not None) == (kind == "native"), reason
    recorder = Recorder(ring, native)
    kernels.track_definitions()
    kernels.set_recorder(recorder)
    dynamo.exempt_own_code()
    return recorder


def define_kernels() -> None:
    """Kernels for a group of one member. The fused operator exists once its module is imported."""

    def copy_tile(
        tile: torch.Tensor, out: torch.Tensor, root: int, group: str, op: str = "sum"
    ) -> None:
        out.copy_(tile)

    def fuse(
        shard: torch.Tensor,
        others: list[torch.Tensor],
        dim: int,
        group: str,
        *,
        return_A: bool = True,
    ) -> Any:
        return shard if return_A else None, [shard @ other for other in others]

    library.impl("one_shot_all_reduce", lambda x, op, group: x.clone(), "CPU")
    library.impl("two_shot_all_reduce_", lambda x, op, group: x, "CPU")
    for key in ("CPU", "Meta"):
        library.impl("tile_reduce", copy_tile, key)
    library.impl("nvshmem_broadcast", lambda x, root, group: x.add_(root), "CPU")
    library.impl("stream_write_value32_", lambda x, offset, value: x, "CPU")
    assert MODULE not in sys.modules
    importlib.import_module(MODULE)
    library.impl("fused_all_gather_matmul", fuse, "CPU")


def call_eagerly(name: str) -> list[Any]:
    x = torch.arange(6.0).view(2, 3)
    reduced = symm_mem.one_shot_all_reduce(x, "sum", name)
    averaged = symm_mem.one_shot_all_reduce(x, reduce_op="avg", group_name=name)
    symm_mem.two_shot_all_reduce_(x, "sum", name)
    sent = symm_mem.nvshmem_broadcast(x.clone(), 0, name)
    kept, products = symm_mem.fused_all_gather_matmul(x, [torch.ones(3, 1)], 0, name)
    dropped, _ = symm_mem.fused_all_gather_matmul(x, [torch.ones(3, 1)], 0, name, return_A=False)
    symm_mem.stream_write_value32_(x, 0, 1)
    results = [reduced, averaged, sent, kept, *products]
    return [*(tensor.tolist() for tensor in results), dropped]


def trace(name: str) -> list[Any]:
    """What tracing, compilation and autograd make of the operators."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func

    def reduce(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = symm_mem.one_shot_all_reduce(x * 2, "sum", name)
        symm_mem.tile_reduce(y, x, 0, name)
        return y + 1

    x = torch.ones(4)
    with FakeTensorMode() as mode:
        fake = symm_mem.one_shot_all_reduce(mode.from_tensor(x), "sum", name)
    traced = make_fx(reduce, tracing_mode="symbolic")(x).code
    # Of operators with a mutated argument, torch functionalizes only those that it compiles.
    pure = torch.func.functionalize(lambda x: symm_mem.one_shot_all_reduce(x, "sum", name).add_(1))
    functional = make_fx(pure)(x).code
    meta = symm_mem.one_shot_all_reduce(torch.ones(4, device="meta"), "sum", name)
    graphs: list[str] = []

    def keep_graph(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(module.code)
        return make_boxed_func(module.forward)

    compiled = torch.compile(reduce, backend=aot_autograd(fw_compiler=keep_graph))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        wanted = torch.ones(4, requires_grad=True)
        result = symm_mem.one_shot_all_reduce(wanted, "sum", name)
    try:
        symm_mem.multimem_all_reduce_(x, "sum", name)  # has no kernel
    except NotImplementedError as error:
        failure = str(error).splitlines()[0][:80]
    return [
        *(repr(fake), traced, functional, repr(meta)),
        *(compiled(x).tolist(), compiled(x).tolist(), graphs),
        *(result.requires_grad, [str(warning.message) for warning in seen], failure),
    ]


def read_ring(recorder: Recorder) -> dict[str, Any]:
    recorder.update_streams()
    reader, now = RingReader(recorder.ring.map), time.monotonic_ns()
    streams = {
        stream.group.title: {
            "backend": stream.group.backend,
            "completed": stream.completed,
            "calls": [
                (call.signature.op, call.signature.shapes, call.signature.reduce_op,
                 call.signature.root, call.site and call.site.function)
                for call in reader.read_calls(stream.uid, now, max_calls=100)
            ],
            "agree": [call.signature.agree for call in reader.read_calls(stream.uid, now)],
        }
        for stream in reader.read_snapshot(now).streams
    }  # fmt: skip
    return {"streams": streams, "faults": faults.fault_counts, "dropped": recorder.count_dropped()}


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    recorder = start_recorder(kind, folder)
    store = FileStore(str(folder / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    first, second = (dist.new_group([0], group_desc=desc) for desc in ("tp", "ep"))
    define_kernels()
    dist.all_reduce(torch.ones(2), group=first)
    results = [call_eagerly(first.group_name), call_eagerly(second.group_name)]
    try:
        symm_mem.one_shot_all_reduce(torch.ones(1), "sum", "no group of torch")
    finally:
        results.append(trace(first.group_name))
    print(json.dumps({"results": results, "ring": recorder and read_ring(recorder)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
