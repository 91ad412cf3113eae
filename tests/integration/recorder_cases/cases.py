"""Two-rank jobs that communicate in every way torch has. Each leaves in a file what its ring holds
of it.
"""

from __future__ import annotations

import _thread
import contextlib
import json
import mmap
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import hangwatch
from hangwatch.model.calls import StreamKind
from hangwatch.ring.layout import LiveWord
from hangwatch.ring.reader import RingReader

CASES = {}
LIBRARIES = []  # definitions of operators last as long as these objects


def register_case(function):
    CASES[function.__name__] = function
    return function


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def make_mesh(*names):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=names or None)


@register_case
def ddp():
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(make_model())
    for _ in range(3):
        wrapped(torch.randn(4, 8)).sum().backward()


@register_case
def fsdp2():
    from torch.distributed.fsdp import fully_shard

    layers = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    for layer in layers:
        fully_shard(layer, mesh=make_mesh())
    fully_shard(layers, mesh=make_mesh())
    for _ in range(2):
        layers(torch.randn(4, 8)).sum().backward()


@register_case
def tensor_parallel():
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    parallelize_module(layers, make_mesh("tp"), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for _ in range(2):
        layers(torch.randn(4, 8, requires_grad=True)).sum().backward()


@register_case
def pipelining():
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank = dist.get_rank()
    stage = PipelineStage(
        nn.Linear(8, 8),
        rank,
        dist.get_world_size(),
        torch.device("cpu"),
        input_args=(torch.randn(2, 8),),
    )
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    for _ in range(2):
        if rank == 0:
            schedule.step(torch.randn(8, 8))
        else:
            schedule.step(target=torch.randn(8, 8))


@register_case
def zero():
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(nn.Linear(8, 4), init_sync=False)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), optimizer_class=torch.optim.SGD, lr=0.1
    )
    for _ in range(2):
        wrapped(torch.randn(4, 8)).sum().backward()
        optimizer.step()


@register_case
def functional():
    import torch.distributed._functional_collectives as funcol

    group = dist.group.WORLD
    x = torch.ones(8)
    (funcol.all_reduce(x, "sum", group) + 0).sum()
    (funcol.all_gather_tensor(x, 0, group) + 0).sum()
    (funcol.reduce_scatter_tensor(x, "sum", 0, group) + 0).sum()
    (funcol.all_to_all_single(x, None, None, group) + 0).sum()
    (funcol.broadcast(x, 0, group) + 0).sum()


@register_case
def compiled():
    import torch.distributed._functional_collectives as funcol

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x):
        return funcol.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

    for _ in range(3):
        step(torch.ones(8))


@register_case
def compiled_with_breaks():
    """Calls that torch.compile leaves to Python, beside declarations that it traces."""
    import hangwatch

    @torch.compile(backend="eager")
    def step(x):
        y = x + 1
        dist.all_reduce(y, async_op=True).wait()
        return y * 2

    @torch.compile(backend="eager", fullgraph=True)
    def declare(x, number):
        hangwatch.step(number)
        with hangwatch.phase("evaluate"), hangwatch.collective("put"):
            return x + 1

    for size in range(2, 6):
        step(torch.ones(size))
        declare(torch.ones(4), size)


@register_case
def without_data():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.nested import nested_tensor

    def reduce_copy(x):
        y = x.clone()
        dist.all_reduce(y)
        return y

    dist.barrier()
    with FakeTensorMode():
        reduce_copy(torch.ones(4))
        dist.all_gather([torch.ones(4)] * 2, torch.ones(4))
        dist.barrier()
    dist.broadcast(torch.ones(4, device="meta"), 0)
    with contextlib.suppress(NotImplementedError):
        dist.all_reduce(nested_tensor([torch.ones(2), torch.ones(3)]))
    graph = make_fx(reduce_copy, tracing_mode="symbolic")(torch.ones(4)).graph
    (placeholder,) = (node for node in graph.nodes if node.op == "placeholder")
    assert not isinstance(placeholder.meta["val"].shape[0], int)


@register_case
def raising():
    """Calls that raise an exception before they communicate, which one rank catches and makes again."""
    from torch.nested import nested_tensor

    if dist.get_rank() == 0:
        int8 = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)
        wrong_calls = (
            lambda: dist.broadcast(torch.ones(4), 7),
            lambda: dist.all_gather_into_tensor(torch.empty(3), torch.ones(4)),
            lambda: dist.reduce_scatter_tensor(torch.empty(3), torch.ones(4)),
            lambda: dist.gather(torch.ones(4), [torch.ones(3)] * 2, 0),
            lambda: dist.all_reduce(int8, async_op=True),
            lambda: dist.all_reduce(nested_tensor([torch.ones(2), torch.ones(3)])),
            lambda: dist.group.WORLD.allreduce([]),
            lambda: dist.group.WORLD.send([torch.ones(4)] * 2, 1, 0),
            lambda: dist.new_group([0, 0]),
        )
        for number, make_call in enumerate(wrong_calls):
            with contextlib.suppress(RuntimeError, ValueError):
                make_call()
                raise AssertionError(f"call {number} did not raise")
    dist.broadcast(torch.ones(4), 0)
    dist.all_reduce(torch.ones(4))
    dist.new_group([0, 1])
    dist.barrier()


@register_case
def unusual_tensors():
    """Tensors that are no plain arrays, yet are sent."""
    from torch.distributed._functional_collectives import all_reduce

    class OwnTensor(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return super().__torch_dispatch__(func, types, args, kwargs or {})

    dist.all_reduce(torch.eye(4).to_sparse())
    dist.broadcast(torch.ones(4, dtype=torch.complex64), 0)
    dist.all_reduce(torch._efficientzerotensor((4,)))
    dist.broadcast(torch.empty(0), 0)
    dist.all_reduce(torch.Tensor._make_subclass(OwnTensor, torch.ones(4)))
    dist.broadcast(all_reduce(torch.ones(4), "sum", dist.group.WORLD), 0)


@register_case
def coalescing():
    with dist._coalescing_manager():
        for _ in range(3):
            dist.all_reduce(torch.ones(8))
    dist.all_reduce_coalesced([torch.ones(2), torch.ones(3)])


@register_case
def inference_mode():
    with torch.inference_mode():
        dist.all_reduce(torch.ones(8))
        dist.broadcast(torch.ones(8), src=0)


def define_unknown_operators():
    """Operators that a later torch may have. Their kernels call gloo itself, past the dispatcher."""
    library = torch.library.Library("c10d", "FRAGMENT")
    group = "__torch__.torch.classes.c10d.ProcessGroup"
    work = "__torch__.torch.classes.c10d.Work"

    def exchange(tensors, boxed_group, async_op=True):
        backend = dist.ProcessGroup.unbox(boxed_group)._get_backend(torch.device("cpu"))
        return backend.barrier().boxed()

    def update(tensor, boxed_group=None):
        return tensor.clone()

    library.define(
        f"exchange_(Tensor[] tensors, {group} process_group, bool async_op=True) -> {work}"
    )
    library.define(f"exchange_.one(Tensor tensor, {group} process_group) -> {work}")
    library.define(f"update_(Tensor tensor, {group}? process_group=None) -> Tensor")
    library.impl("exchange_", exchange, "CPU")
    library.impl("exchange_.one", exchange, "CPU")
    library.impl("update_", update, "CPU")
    LIBRARIES.append(library)


@register_case
def unknown_operators():
    """Unknown operators between other calls, with shapes that legally differ between ranks."""
    c10d, group = torch.ops.c10d, dist.group.WORLD.boxed()
    mine = torch.ones(1 + dist.get_rank(), 2)

    def wait(boxed_work):
        dist.Work.unbox(boxed_work).wait()

    wait(c10d.exchange_.default([mine, torch.ones(3)], group, False))
    dist.all_reduce(torch.ones(4))
    c10d.update_.default(mine, group)
    c10d.update_.default(mine)  # without a group, it does not communicate
    wait(c10d.exchange_.one(mine, group))
    wait(c10d.exchange_.default([mine], group))


@register_case
def threads_without_frames():
    """Calls that no frame of Python's makes, as autograd's threads for devices do under DDP."""
    barrier = torch.ops.c10d.barrier.default._op
    reader, deadline = open_ring(), time.monotonic() + 10
    threads = _thread._count()
    for number in range(1, 5):
        if number < 4:
            _thread.start_new_thread(
                barrier, (torch.empty(0), dist.group.WORLD.boxed(), [], True, -1)
            )
        else:
            _thread.start_new_thread(dist.barrier, ())
        while time.monotonic() < deadline:
            entered = [
                s.entered
                for s in reader.read_snapshot(0).streams
                if s.kind is StreamKind.COLLECTIVE
            ]
            # A thread that is still in the call when Python exits would end the process.
            if entered == [number] and _thread._count() == threads:
                break
            time.sleep(0.01)


@register_case
def objects():
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {"rank": dist.get_rank()})
    dist.broadcast_object_list([dist.get_rank()], src=0)


@register_case
def batched_p2p():
    peer = 1 - dist.get_rank()
    for _ in range(3):
        calls = [
            dist.P2POp(dist.isend, torch.ones(4), peer),
            dist.P2POp(dist.irecv, torch.empty(4), peer),
        ]
        for work in dist.batch_isend_irecv(calls):
            work.wait()


@register_case
def every_collective():
    world_size = dist.get_world_size()
    x, whole = torch.ones(4), torch.empty(4 * world_size)
    pieces = [torch.ones(4) for _ in range(world_size)]
    at_root = dist.get_rank() == 0
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    dist.reduce(x, dst=1)
    dist.broadcast(x, src=0)
    dist.all_gather(pieces, x)
    dist.all_gather_into_tensor(whole, x)
    dist.reduce_scatter(x, pieces)
    dist.reduce_scatter_tensor(x, torch.ones(4 * world_size))
    dist.gather(x, pieces if at_root else None, dst=0)
    dist.scatter(x, pieces if at_root else None, src=0)
    dist.all_to_all_single(torch.empty(4), torch.ones(4))
    dist.barrier()
    dist.monitored_barrier()


@register_case
def blocked_in_the_operator():
    """A call whose operator blocks until it completes, right after other calls: every poll of the ring
    must show the earlier ones as completed.
    """
    reader, seen_file, counts = open_ring(), Path(os.environ["SEEN_AT"], "blocked"), []

    def read_collective_counts():
        streams = reader.read_snapshot(0).streams
        collectives = [s for s in streams if s.kind is StreamKind.COLLECTIVE]
        newest = max(collectives, key=lambda stream: stream.uid)
        return newest.entered, newest.completed

    def watch_ring():
        while read_collective_counts()[0] < 31:
            time.sleep(0.01)
        time.sleep(0.5)
        counts.append(read_collective_counts())
        seen_file.touch()

    for _ in range(30):
        dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 0:
        threading.Thread(target=watch_ring, daemon=True).start()
    else:
        deadline = time.monotonic() + 10
        while not seen_file.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    dist.monitored_barrier()
    assert dist.get_rank() or counts == [(31, 30)], counts


@register_case
def subgroups():
    everyone = dist.new_group([0, 1], group_desc="everyone")
    alone = [dist.new_group([rank], group_desc=f"alone{rank}") for rank in range(2)]
    for _ in range(5):
        dist.all_reduce(torch.ones(4), group=everyone)
    dist.all_reduce(torch.ones(4), group=alone[dist.get_rank()])


@register_case
def declared():
    """Communication outside torch, declared with hangwatch.collective: among a group's calls and as
    those of another library.
    """
    everyone = dist.new_group([0, 1], group_desc="everyone")
    works = [dist.all_reduce(torch.ones(1 << 20), async_op=True) for _ in range(3)]
    with hangwatch.collective("exchange"):
        pass
    for work in works:
        work.wait()
    dist.reduce_scatter_tensor(
        torch.empty(2), torch.ones(4)
    )  # gloo never says that this is complete
    with hangwatch.collective("exchange"):
        pass
    with hangwatch.collective("outer", everyone):
        dist.all_reduce(torch.ones(4), group=everyone)
    with contextlib.suppress(KeyError), hangwatch.collective("fails", everyone):
        raise KeyError

    def declare_in_thread():
        for _ in range(20):
            with (
                hangwatch.collective("Allreduce", "mpi"),
                hangwatch.collective("Inner", "nested", ranks=(1, 0)),
            ):
                time.sleep(0.001)

    thread = threading.Thread(target=declare_in_thread)
    thread.start()
    for _ in range(20):
        with hangwatch.collective("put", ranks=range(2)):
            time.sleep(0.001)
    thread.join()
    dist.destroy_process_group()
    with hangwatch.collective("afterwards"):
        pass


@register_case
def own_backend():
    """A process group whose backend is a third-party C++ extension."""
    x = torch.ones(8)
    for _ in range(3):
        dist.all_reduce(x)
    dist.broadcast(x, src=0)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert x.tolist() == [16.0] * 8  # the backend only doubles the tensor


def open_ring():
    """This process's own ring, as others read it."""
    (path,) = Path(os.environ["HANGWATCH_RUN_DIR"]).rglob(f"{os.getpid()}-*.ring")
    with path.open("rb") as file:
        return RingReader(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def describe_ring(reader, setup_before, streams_before):
    """What the ring holds, without the setup calls and the streams of earlier cases."""
    now = time.monotonic_ns()
    snapshot = reader.read_snapshot(now)
    return {
        "rank": int(os.environ["RANK"]),
        "recorder": snapshot.identity["recorder"],
        "errors": reader.read_live_word(LiveWord.ERRORS),
        "faults": snapshot.faults,
        "dropped": snapshot.dropped,
        "setup": [
            op
            for position, op in sorted(list_setup_calls(reader, snapshot).items())
            if position not in setup_before
        ],
        "streams": [
            {
                "kind": s.kind.value,
                "desc": s.group.desc,
                "ranks": s.group.ranks,
                "peer": s.peer,
                "entered": s.entered,
                "completed": s.completed,
                "calls": [
                    {
                        "seq": c.seq,
                        "op": c.signature.op,
                        "shapes": c.signature.shapes,
                        "dtype": c.signature.dtype,
                        "duration_s": c.duration_s,
                        "reduce_op": c.signature.reduce_op,
                        "root": c.signature.root,
                        "function": c.site and c.site.function,
                        "file": c.site and Path(c.site.file).name,
                    }
                    for c in reader.read_calls(s.uid, now, max_calls=2048)
                ],
            }
            for s in snapshot.streams
            if s.kind is not StreamKind.SETUP and s.uid not in streams_before
        ],
    }


def list_setup_calls(reader, snapshot):
    """The set-up calls by the number of the stream and of the call in it."""
    now = time.monotonic_ns()
    return {
        (s.uid, c.seq): c.signature.op
        for s in snapshot.streams
        if s.kind is StreamKind.SETUP
        for c in reader.read_calls(s.uid, now, max_calls=2048)
    }


def run_case(name):
    """Returns what the ring holds of a case."""
    setup_before, streams_before = {}, set()
    with contextlib.suppress(ValueError):  # there is no ring before the first case
        reader = open_ring()
        snapshot = reader.read_snapshot(0)
        setup_before = list_setup_calls(reader, snapshot)
        streams_before = {s.uid for s in snapshot.streams}
    if name == "own_backend":
        sys.path.insert(0, os.environ["EXTENSION"])
        import doubling

        dist.Backend.register_backend("doubling", doubling.create, devices=["cpu"])
    elif name == "unknown_operators":
        define_unknown_operators()
    # A store of its own: in torchrun's, the keys of the case before are still there.
    store = dist.FileStore(str(Path(os.environ["SEEN_AT"], f"{name}.store")), 2)
    backend = "doubling" if name == "own_backend" else "gloo"
    dist.init_process_group(backend, store=store, rank=int(os.environ["RANK"]), world_size=2)
    CASES[name]()
    reader = open_ring()
    deadline = time.monotonic() + 5  # the poller comes by ten times a second
    while time.monotonic() < deadline and any(
        s.completed not in (None, s.entered)
        for s in reader.read_snapshot(0).streams
        if s.uid not in streams_before
    ):
        time.sleep(0.05)
    return describe_ring(reader, setup_before, streams_before)


def main():
    """Runs the cases that the variable CASES names, each with process groups of its own."""
    seen = {}
    for name in os.environ["CASES"].split(","):
        if dist.is_initialized():
            dist.destroy_process_group()
        seen[name] = run_case(name)
    Path(os.environ["SEEN_AT"], f"seen{os.environ['RANK']}.json").write_text(json.dumps(seen))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
