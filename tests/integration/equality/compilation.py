"""What torch.compile, make_fx and export make of communication."""

import io
import logging
import re

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from registry import describe_tensor, register_aspect
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def without_addresses(text):
    return re.sub(r"0x[0-9a-f]+", "ADDRESS", str(text))


def describe_graph(graph_module):
    return [
        without_addresses(f"{node.op} {node.target}")
        for node in graph_module.graph.nodes
        if node.op not in ("placeholder", "output")
    ]


def describe_break(reason):
    """Dynamo calls functions of torch that hangwatch wraps disabled, and not skipped."""
    text = without_addresses(reason)
    return "at destroy_process_group" if "destroy_process_group" in text else text


def run_compiled(function, inputs, **options):
    """What Dynamo hands to a backend for `function`, its counters and its messages."""
    torch._dynamo.reset()
    counters.clear()
    graphs, messages = [], io.StringIO()

    def backend(graph_module, example_inputs):
        graphs.append(describe_graph(graph_module))
        return graph_module.forward

    handler = logging.StreamHandler(messages)
    logging.getLogger("torch._dynamo").addHandler(handler)
    try:
        compiled = torch.compile(function, backend=backend, **options)
        results = [compiled(x).tolist()[:4] for x in inputs]
    finally:
        logging.getLogger("torch._dynamo").removeHandler(handler)
    return {
        "graphs": graphs,
        "frames": dict(counters["frames"]),
        "stats": dict(counters["stats"]),
        "breaks": [describe_break(key) for key in counters["graph_break"]],
        "messages": messages.getvalue(),
        "results": results,
    }


def reduce_async(x):
    y = x + 1
    dist.all_reduce(y, async_op=True).wait()
    return y * 2


def gather_after_break(x):
    y = x + 1
    torch._dynamo.graph_break()
    dist.all_gather([torch.empty_like(y), torch.empty_like(y)], y)
    z = y * 3
    return z + 1


def make_group(x):
    group = dist.new_group([0, 1])
    y = x * 2
    dist.all_reduce(y, group=group)
    dist.destroy_process_group(group)
    return y + 1


def communicate_functionally(x):
    return funcol.all_reduce(x * 2, "sum", dist.group.WORLD) + 1


def catch_error(x):
    y = x + 1
    try:
        dist.broadcast(y, 9)
    except Exception:
        y = y - 1
    return y * 2


@register_aspect
def dynamo_graphs():
    inputs = [torch.ones(n) for n in (4, 4, 5, 6, 7)]
    functions = (
        reduce_async,
        gather_after_break,
        make_group,
        communicate_functionally,
        catch_error,
    )
    return {function.__name__: run_compiled(function, inputs) for function in functions}


@register_aspect
def dynamo_graphs_of_many_shapes():
    inputs = [torch.ones(n, n % 5 + 1) for n in range(2, 30)]
    report = run_compiled(gather_after_break, inputs)
    report["dynamic"] = run_compiled(gather_after_break, inputs, dynamic=True)
    report["static"] = run_compiled(reduce_async, inputs, dynamic=False)
    return report


@register_aspect
def dynamo_without_breaks():
    """Compilation with fullgraph, and with a stance that permits no recompilation."""
    report = run_compiled(communicate_functionally, [torch.ones(4)], fullgraph=True)
    compiled = torch.compile(gather_after_break, backend="eager")
    for n in range(2, 6):
        compiled(torch.ones(n))
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            report["stance"] = compiled(torch.ones(3)).tolist()
    except Exception as error:
        report["stance"] = f"{type(error).__name__} {error}"
    return report


@register_aspect
def dynamo_explanation():
    torch._dynamo.reset()
    explanation = torch._dynamo.explain(gather_after_break)(torch.ones(4))
    return {
        "graphs": [describe_graph(graph) for graph in explanation.graphs],
        "graph_count": explanation.graph_count,
        "breaks": [without_addresses(reason.reason) for reason in explanation.break_reasons],
        "guards": len(explanation.out_guards or ()),
    }


@register_aspect
def compiled_training():
    """DDP and a compiled model, with AOTAutograd."""
    from torch.nn.parallel import DistributedDataParallel

    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(3)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    compiled = torch.compile(model, backend="aot_eager")
    losses = []
    for n in (4, 4, 5):
        loss = compiled(torch.ones(n, 8)).sum()
        loss.backward()
        losses.append(round(loss.item(), 3))
    return {
        "losses": losses,
        "frames": dict(counters["frames"]),
        "aot": dict(counters["aot_autograd"]),
        "gradient": describe_tensor(model.module.weight.grad),
    }


def reduce_in_place(x):
    y = x.clone()
    dist.all_reduce(y)
    return y


def broadcast_in_place(x):
    y = x.clone()
    dist.broadcast(y, 0)
    return y + 1


def gather_into(x):
    y = x.new_empty(2 * x.shape[0])
    dist.all_gather_into_tensor(y, x)
    return y


TRACED = (reduce_in_place, broadcast_in_place, gather_into, communicate_functionally)


@register_aspect
def traces_of_make_fx():
    report = {}
    for mode in ("real", "fake", "symbolic"):
        for function in TRACED:
            graph = make_fx(function, tracing_mode=mode)(torch.ones(4))
            values = [node.meta["val"] for node in graph.graph.nodes if "val" in node.meta]
            report[f"{function.__name__} {mode}"] = {
                "code": graph.code,
                "shapes": [str(getattr(value, "shape", "")) for value in values],
            }
    return report


class Exported(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x) * 2


@register_aspect
def exported_programs():
    report = {}
    for function in TRACED:
        for strict in (False, True):
            name = f"{function.__name__} strict={strict}"
            try:
                program = torch.export.export(
                    Exported(function),
                    (torch.ones(4),),
                    dynamic_shapes={"x": {0: torch.export.Dim("n")}},
                    strict=strict,
                )
                report[name] = program.graph_module.code, str(program.range_constraints)
            except Exception as error:
                report[name] = type(error).__name__, " ".join(without_addresses(error).split())
    return report


FAKE_CALLS = {
    "all_reduce": lambda x: dist.all_reduce(x),
    "all_reduce_async": lambda x: dist.all_reduce(x, async_op=True),
    "broadcast": lambda x: dist.broadcast(x, 0),
    "all_gather_into_tensor": lambda x: dist.all_gather_into_tensor(x.new_empty(10), x),
    "all_gather": lambda x: dist.all_gather([torch.empty_like(x), torch.empty_like(x)], x),
    "barrier": lambda x: dist.barrier(),
    "functional": lambda x: funcol.all_reduce(x, "sum", dist.group.WORLD),
}


@register_aspect
def fake_tensors():
    """Calls with fake tensors on rank 0 alone: nothing is communicated."""
    report = {}
    if dist.get_rank() != 0:
        return report
    for name, call in FAKE_CALLS.items():
        if name == "barrier":  # no tensor shows that it is fake
            continue
        for is_symbolic in (False, True):
            environment = ShapeEnv()
            mode = FakeTensorMode(shape_env=environment)
            with mode:
                x = mode.from_tensor(torch.ones(5), static_shapes=not is_symbolic)
                try:
                    result = type(call(x)).__name__
                except Exception as error:
                    result = f"{type(error).__name__} {error}"
            report[f"{name} symbolic={is_symbolic}"] = (
                result,
                str(x.shape),
                [str(guard.expr) for guard in environment.guards],
            )
    return report


@register_aspect
def meta_tensors():
    """Calls with meta tensors on rank 1 alone."""
    report = {}
    if dist.get_rank() != 1:
        return report
    for name, call in FAKE_CALLS.items():
        if name != "barrier":
            x = torch.ones(5, device="meta")
            try:
                report[name] = type(call(x)).__name__, str(x.shape), str(x.device)
            except Exception as error:
                report[name] = type(error).__name__, str(error)
    return report


@register_aspect
def compiler_messages():
    """What a user reads with TORCH_LOGS=recompiles,graph_breaks."""
    torch._dynamo.reset()
    output = io.StringIO()
    handler = logging.StreamHandler(output)
    torch._logging.set_logs(recompiles=True, graph_breaks=True)
    logger = logging.getLogger("torch._dynamo")
    kept, logger.handlers, logger.propagate = logger.handlers, [handler], False
    try:
        compiled = torch.compile(gather_after_break, backend="eager")
        for n in (3, 4, 5):
            compiled(torch.ones(n))
    finally:
        logger.handlers, logger.propagate = kept, True
        torch._logging.set_logs()
    lines = output.getvalue().splitlines()
    return len(lines), [line for line in lines if "hangwatch" in line]
