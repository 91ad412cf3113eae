"""Exceptions and warnings of communication, as the user sees them."""

import datetime
import inspect
import pickle
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from registry import describe_exception, register_aspect

FAILING_CALLS = {
    "source": lambda: dist.broadcast(torch.ones(3), 9),
    "negative source": lambda: dist.broadcast(torch.ones(3), -2),
    "buffer": lambda: dist.all_gather_into_tensor(torch.ones(3), torch.ones(3)),
    "list": lambda: dist.all_gather([torch.empty(3)], torch.ones(3)),
    "shapes of list": lambda: dist.all_gather([torch.empty(3), torch.empty(4)], torch.ones(3)),
    "dtype of list": lambda: dist.all_gather(
        [torch.empty(3), torch.empty(3, dtype=torch.int64)], torch.ones(3)
    ),
    "no tensor": lambda: dist.all_reduce(3),
    "no tensors": lambda: dist.all_gather([], torch.ones(3)),
    "reduce op": lambda: dist.all_reduce(torch.ones(3), op=dist.ReduceOp.AVG),
    "reduce op type": lambda: dist.all_reduce(torch.ones(3), op="sum"),
    "bitwise": lambda: dist.all_reduce(torch.ones(3), op=dist.ReduceOp.BAND),
    "scatter list": lambda: dist.scatter(torch.ones(3), [torch.ones(3)], src=dist.get_rank()),
    "gather list": lambda: dist.gather(torch.ones(3), None, dst=dist.get_rank()),
    "splits": lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 1], [1, 1]),
    "send to self": lambda: dist.send(torch.ones(3), dist.get_rank()),
    "sparse gather": lambda: dist.all_gather([torch.empty(3)] * 2, torch.ones(3).to_sparse()),
    "not contiguous": lambda: dist.all_gather_into_tensor(
        torch.ones(4, 3).t(), torch.ones(2, 3).t()
    ),
    "functional op": lambda: funcol.all_reduce(torch.ones(3), "no such op", dist.group.WORLD),
    "group": lambda: dist.all_reduce(torch.ones(3), group="no such group"),
    "init again": lambda: dist.init_process_group("gloo"),
    "init backend": lambda: dist.init_process_group("no such backend"),
    "new_group ranks": lambda: dist.new_group([0, 7]),
    "new_group twice": lambda: dist.new_group([0, 0]),
    "new_group backend": lambda: dist.new_group([0, 1], backend="no such backend"),
    "new_group argument": lambda: dist.new_group([0], no_such_argument=1),
    "init argument": lambda: dist.init_process_group("gloo", no_such_argument=1),
    "split_group": lambda: dist.split_group(split_ranks=[[0], [1]]),
    "destroy": lambda: dist.destroy_process_group("no such group"),
    "subgroups": lambda: dist.new_subgroups(group_size=3),
    "monitored timeout": lambda: dist.monitored_barrier(timeout=datetime.timedelta(seconds=0)),
}


@register_aspect
def exceptions():
    report = {}
    for name, call in FAILING_CALLS.items():
        if name == "monitored timeout":
            continue
        try:
            call()
            report[name] = "no exception"
        except Exception as error:
            report[name] = describe_exception(error)
    return report


@register_aspect
def exceptions_of_a_lost_peer():
    """A receive that times out, in a group of its own. Its peer does not wait meanwhile: that would be a
    deadlock, which hangwatch reports.
    """
    # The timeout is long enough for the two to connect on a loaded machine.
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=4))
    dist.barrier(group)
    store = dist.distributed_c10d._get_default_store()
    report = None
    if dist.get_rank() == 0:
        try:
            dist.recv(torch.ones(3), 1, group=group)
        except Exception as error:
            report = describe_exception(error)
            report["text"] = "Timed out" in report["text"]  # it has an address
        store.set("receive timed out", "yes")
    while not store.check(["receive timed out"]):
        time.sleep(0.1)
    dist.barrier()
    return report


@register_aspect
def exceptions_of_workers():
    """Raised where the user waits."""
    report = {}

    def fail(future):
        raise ValueError("as planned")

    try:
        dist.all_reduce(torch.ones(4), async_op=True).get_future().then(fail).wait()
    except Exception as error:
        report["then"] = type(error).__name__, str(error).splitlines()[0]
    return report


def use_new_group():
    """A rank that destroyed it at once would close connections that the other rank has not accepted."""
    group = dist.new_group([0, 1])
    dist.barrier(group)
    dist.destroy_process_group(group)


WARNING_CALLS = {
    "new_group": use_new_group,
    "all_gather_base": lambda: dist._all_gather_base(torch.empty(6), torch.ones(3)),
    "reduce_scatter_base": lambda: dist._reduce_scatter_base(torch.empty(3), torch.ones(6)),
    "all_reduce_coalesced": lambda: dist.all_reduce_coalesced([torch.ones(3)]),
    "barrier": lambda: dist.barrier(),
    "monitored_barrier": lambda: dist.monitored_barrier(wait_all_ranks=True),
    "objects": lambda: dist.broadcast_object_list([1]),
    "group_rank": lambda: dist.distributed_c10d.get_global_rank(dist.group.WORLD, 0),
    "reduce_op": lambda: dist.reduce_op.SUM,
    "functional": lambda: funcol.all_reduce(torch.ones(3), "sum", dist.group.WORLD) + 1,
    "not a member": lambda: dist.all_reduce(
        torch.ones(3), group=dist.new_group([1 - dist.get_rank()], use_local_synchronization=True)
    ),
}


@register_aspect
def shown_warnings():
    """The texts of warnings, and the lines to which they point."""
    report = {}
    for name, call in WARNING_CALLS.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                call()
            except Exception as error:
                report[f"{name} raised"] = describe_exception(error)
        report[name] = [
            (str(w.message), w.category.__name__, w.filename.rpartition("/")[2], w.lineno)
            for w in caught
        ]
    return report


@register_aspect
def functions_as_objects():
    """What inspection and pickling see of the functions of torch.distributed."""
    report = {}
    for name in ("init_process_group", "new_group", "split_group", "destroy_process_group"):
        function = getattr(dist, name)
        report[name] = {
            "signature": str(inspect.signature(function)),
            "name": function.__qualname__,
            "module": function.__module__,
            "doc": len(function.__doc__ or ""),
            "file": inspect.getsourcefile(inspect.unwrap(function)).rpartition("/")[2],
            "source": len(inspect.getsource(function)),
            "pickled": pickle.loads(pickle.dumps(function)) is function,
            "same": function is getattr(dist.distributed_c10d, name),
            "annotations": sorted(function.__annotations__),
            "defaults": repr(inspect.unwrap(function).__defaults__),
        }
    operators = [str(op) for op in torch._C._dispatch_get_all_op_names() if "c10d" in str(op)]
    report["operators"] = sorted(name for name in operators if "hangwatch" not in name)
    return report
