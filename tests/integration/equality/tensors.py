"""Results of communication, and what torch's modes, subclasses and profilers see of it."""

import json
import re
import tempfile
from collections import Counter

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as differentiable
from lifetimes import CALLS
from registry import describe_tensor, register_aspect, run_in_thread
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


def run_calls(names=tuple(CALLS)):
    """The arguments of each call after it."""
    report = {}
    for name in names:
        x, y = torch.arange(8.0) + dist.get_rank(), torch.zeros(8)
        CALLS[name](x, y)
        report[name] = describe_tensor(x), describe_tensor(y)
    return report


@register_aspect
def results_of_calls():
    return run_calls()


@register_aspect
def results_in_inference_mode():
    with torch.inference_mode():
        report = run_calls()
    x = torch.ones(4)
    with torch.inference_mode():
        dist.all_reduce(x)
        created = funcol.all_reduce(x, "sum", dist.group.WORLD) + 0
    report["made outside"] = x.is_inference(), x._version
    report["made inside"] = created.is_inference()
    return report


@register_aspect
def results_without_gradients():
    weight = torch.nn.Parameter(torch.ones(4))
    with torch.no_grad():
        dist.all_reduce(weight)
    report = {"parameter": describe_tensor(weight)}
    for dtype in (torch.int64, torch.float16, torch.bfloat16, torch.bool, torch.complex64):
        x = torch.ones(4).to(dtype)
        try:
            dist.all_reduce(x, op=dist.ReduceOp.SUM)
            report[str(dtype)] = str(x.tolist())
        except Exception as error:
            report[str(dtype)] = type(error).__name__, str(error)
    for name, x in {
        "transposed": torch.ones(3, 4).t(),
        "strided": torch.ones(8)[::2],
        "empty": torch.empty(0),
        "scalar": torch.tensor(3.0),
        "expanded": torch.ones(1).expand(4),
    }.items():
        try:
            dist.all_reduce(x)
            report[name] = str(x.tolist()), x.stride()
        except Exception as error:
            report[name] = type(error).__name__, str(error)
    return report


@register_aspect
def autograd():
    report = {}
    packed = []

    def count_packed(x):
        packed.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(count_packed, lambda x: x):
        for name, call in {
            "all_reduce": lambda x: differentiable.all_reduce(x * 2),
            "all_gather": lambda x: torch.cat(differentiable.all_gather(x * 2)),
            "reduce_scatter": lambda x: differentiable.reduce_scatter(
                torch.empty(4), list((x * 2).chunk(2))
            ),
            "all_to_all_single": lambda x: differentiable.all_to_all_single(
                torch.empty_like(x), x * 2
            ),
            "broadcast": lambda x: differentiable.broadcast(x * 2, 0),
            "functional": lambda x: (
                funcol.all_gather_tensor_autograd(x * 2, 0, dist.group.WORLD) + 0
            ),
        }.items():
            x = torch.arange(8.0, requires_grad=True)
            out = call(x)
            names, node = [], out.grad_fn
            while node is not None:
                names.append(node.name())
                node = next((n for n, _ in node.next_functions if n is not None), None)
            (out * out).sum().backward()
            report[name] = describe_tensor(out), names, describe_tensor(x.grad)
    report["packed"] = packed
    leaf = torch.ones(4, requires_grad=True)
    out = leaf * 2
    dist.all_reduce(out.detach())
    report["detached"] = describe_tensor(out)
    try:
        dist.all_reduce(leaf)
        report["leaf"] = describe_tensor(leaf)
    except Exception as error:
        report["leaf"] = type(error).__name__, str(error)
    return report


class DispatchLog(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls.append(f"{function} {[type(a).__name__ for a in args]}")
        return function(*args, **(kwargs or {}))


class FunctionLog(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.calls.append(getattr(function, "__name__", str(function)))
        return function(*args, **(kwargs or {}))


@register_aspect
def calls_seen_by_modes():
    report = {}
    for mode_class in (DispatchLog, FunctionLog):
        with mode_class() as log:
            run_calls([name for name in CALLS if name not in ("raises", "objects")])
        report[mode_class.__name__] = Counter(log.calls)
    return report


class Logged(torch.Tensor):
    """A wrapper, as quantized and distributed tensors are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        cls.log.append(str(function))

        def unwrap(x):
            return x.inner if isinstance(x, Logged) else x

        return torch.utils._pytree.tree_map(
            lambda x: Logged(x) if type(x) is torch.Tensor else x,
            function(
                *torch.utils._pytree.tree_map(unwrap, args),
                **torch.utils._pytree.tree_map(unwrap, kwargs or {}),
            ),
        )


Logged.log = []


class Plain(torch.Tensor):
    """A subclass without behaviour of its own."""


class Traced(torch.Tensor):
    """A subclass that sees the functions that are called with it."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        Traced.log.append(getattr(function, "__name__", str(function)))
        return super().__torch_function__(function, types, args, kwargs or {})


Traced.log = []


@register_aspect
def subclasses():
    report = {}
    Logged.log.clear()
    Traced.log.clear()
    for name in ("all_reduce", "broadcast", "all_gather", "all_to_all_single", "functional"):
        for kind in (Logged, lambda x: x.as_subclass(Plain), lambda x: x.as_subclass(Traced)):
            x, y = kind(torch.arange(8.0)), kind(torch.zeros(8))
            key = f"{name} {type(x).__name__}"
            try:
                CALLS[name](x, y)
                report[key] = describe_tensor(getattr(x, "inner", x)), type(x).__name__
            except Exception as error:
                report[key] = type(error).__name__, str(error)
    report["log"] = list(Logged.log)
    report["functions"] = Counter(Traced.log)
    return report


@register_aspect
def dtensors():
    mesh = init_device_mesh("cpu", (2,))
    report = {}
    with CommDebugMode() as communication:
        x = distribute_tensor(torch.arange(16.0).reshape(4, 4), mesh, [Shard(0)])
        replicated = x.redistribute(mesh, [Replicate()])
        product = x @ replicated
        total = product.sum()
        resharded = x.redistribute(mesh, [Shard(1)])
        full = total.full_tensor()
    report["communication"] = {str(k): v for k, v in communication.get_comm_counts().items()}
    report["placements"] = [str(t.placements) for t in (x, replicated, product, total, resharded)]
    report["full"] = full.item()
    report["types"] = [isinstance(t, DTensor) for t in (x, product, total)]
    report["local"] = describe_tensor(resharded.to_local())
    return report


@register_aspect
def fsdp2():
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        loss = model(torch.ones(4, 8)).square().sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((round(loss.item(), 4), round(norm.full_tensor().item(), 4)))
    return {
        "losses": losses,
        "parameters": [describe_tensor(p.to_local()) for p in model.parameters()],
    }


@register_aspect
def ddp():
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4)),
        find_unused_parameters=True,
    )
    buckets = []

    def reduce_bucket(state, bucket):
        buckets.append((bucket.index(), len(bucket.parameters()), list(bucket.buffer().shape)))
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / 2)

    model.register_comm_hook(None, reduce_bucket)
    losses = []
    for _ in range(3):
        loss = model(torch.ones(4, 8) + dist.get_rank()).square().sum()
        loss.backward()
        losses.append(round(loss.item(), 4))
    logged = model._get_ddp_logging_data()
    numbers = ("num_buckets", "num_parameter_tensors", "bucket_sizes", "iteration", "comm_hook")
    return {
        "losses": losses,
        "buckets": buckets,
        "logged": {name: str(logged.get(name)) for name in numbers},
        "gradient": describe_tensor(next(model.parameters()).grad),
    }


def count_events(profiler):
    return {event.key: event.count for event in profiler.key_averages()}


@register_aspect
def profiles():
    report = {}
    names = [name for name in CALLS if name != "objects"]
    activities = [torch.profiler.ProfilerActivity.CPU]
    run_calls()
    with torch.profiler.profile(activities=activities) as profiler:
        run_calls(names)
    report["events"] = count_events(profiler)
    with torch.profiler.profile(
        activities=activities, record_shapes=True, with_flops=True
    ) as profiler:
        run_calls(names)
    report["shapes"] = sorted(
        f"{e.key} {e.input_shapes} {e.count}"
        for e in profiler.key_averages(group_by_input_shape=True)
    )
    with torch.autograd.profiler.profile() as profiler:
        run_calls(names)
    report["autograd"] = count_events(profiler)
    # A name that happens to end in "gz" would make torch compress the trace.
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        observer = torch.profiler.ExecutionTraceObserver().register_callback(file.name)
        observer.start()
        run_calls(names)
        observer.stop()
        observer.unregister_callback()
        report["execution trace"] = Counter(node["name"] for node in json.load(file)["nodes"])
    return report


@register_aspect
def profiles_with_stacks():
    """The Python functions that a profile shows, without those of the interpreter's own threads."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True
    ) as profiler:
        run_calls(["all_reduce", "broadcast", "all_gather", "barrier"])
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        with open(f"{folder}/trace.json") as file:
            events = json.load(file)["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "python_function"]
    return Counter(name for name in names if re.match(r"torch/|.*/(torch|equality)/", name))


@register_aspect
def random_numbers():
    import random

    import numpy

    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    run_calls()
    x = torch.ones(300)
    dist.all_reduce(x)
    return torch.rand(3).tolist(), random.random(), float(numpy.random.rand())


@register_aspect
def works():
    x = torch.ones(4)
    work = dist.all_reduce(x, async_op=True)
    order = []
    future = work.get_future().then(lambda f: order.append("then") or f.value()[0])
    work.wait()
    value = future.wait()
    report = {
        "type": type(work).__name__,
        "attributes": sorted(name for name in dir(work) if not name.startswith("__")),
        "completed": work.is_completed(),
        "success": work.is_success(),
        "value": describe_tensor(value),
        "same storage": value.data_ptr() == x.data_ptr(),
        "order": order,
        "no work": [dist.all_reduce(x) is None, dist.barrier() is None],
    }
    threads = []
    run_in_thread(lambda: threads.append(dist.all_reduce(x, async_op=True).wait()))
    report["thread"] = threads
    return report


@register_aspect
def flops():
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        y = torch.ones(4, 8) @ torch.ones(8, 4)
        dist.all_reduce(y)
        funcol.all_reduce(y, "sum", dist.group.WORLD)
    return counter.get_total_flops(), {str(k): str(v) for k, v in counter.get_flop_counts().items()}
