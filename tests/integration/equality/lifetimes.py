"""What lives on after a call, and how much memory the job needs."""

import contextlib
import gc
import statistics
import threading
import time
import weakref

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from registry import measure, register_aspect
from torch import nn

MB = 1 << 20
REPETITIONS = 7
# The backend's own thread drops a tensor a little after the call has returned.
SETTLE_S = 0.02


class Owned:
    """An object of the user's, in a local variable of the function that communicates."""


def gather_list():
    return [torch.zeros(8) for _ in range(dist.get_world_size())]


def call_send_and_receive(x, y):
    if dist.get_rank() == 0:
        dist.send(x, 1)
        dist.recv(y, 1)
    else:
        dist.recv(y, 0)
        dist.send(x, 0)


def call_in_batch(x, y):
    peer = 1 - dist.get_rank()
    operations = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, y, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def call_and_raise(x, y):
    with contextlib.suppress(Exception):
        dist.broadcast(x, 7)
    with contextlib.suppress(Exception):
        dist.all_gather_into_tensor(y, x)


def call_coalesced(x, y):
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(x)
        dist.all_reduce(y)
    manager.wait()


CALLS = {
    "all_reduce": lambda x, y: dist.all_reduce(x),
    "all_reduce_async": lambda x, y: dist.all_reduce(x, async_op=True).wait(),
    "all_reduce_coalesced": lambda x, y: dist.all_reduce_coalesced([x, y]),
    "broadcast": lambda x, y: dist.broadcast(x, 0),
    "reduce": lambda x, y: dist.reduce(x, 0),
    "all_gather": lambda x, y: dist.all_gather(gather_list(), x),
    "all_gather_into_tensor": lambda x, y: dist.all_gather_into_tensor(torch.empty(16), x),
    "reduce_scatter_tensor": lambda x, y: dist.reduce_scatter_tensor(torch.empty(4), x),
    "gather": lambda x, y: dist.gather(x, gather_list() if dist.get_rank() == 0 else None),
    "scatter": lambda x, y: dist.scatter(x, gather_list() if dist.get_rank() == 0 else None),
    "all_to_all_single": lambda x, y: dist.all_to_all_single(y, x),
    "barrier": lambda x, y: dist.barrier(),
    "monitored_barrier": lambda x, y: dist.monitored_barrier(),
    "send_and_receive": call_send_and_receive,
    "batched": call_in_batch,
    "functional": lambda x, y: funcol.all_reduce(x, "sum", dist.group.WORLD) + y,
    "objects": lambda x, y: dist.all_gather_object([None, None], {"x": x}),
    "raises": call_and_raise,
    "coalesced": call_coalesced,
}


@contextlib.contextmanager
def no_collector():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def count_alive(references):
    """The objects that are alive when the backend is done with them."""
    time.sleep(SETTLE_S)
    return sum(reference() is not None for reference in references)


def count_after(function):
    """The objects that live on after `function`, which returns weak references to what it made: the
    median, since the backend's own threads may be late.
    """
    function()  # imports and caches of torch's own
    return statistics.median(count_alive(function()) for _ in range(REPETITIONS))


@register_aspect
def objects_after_calls():
    def use(call):
        owned, x, y = Owned(), torch.ones(8), torch.ones(8)
        call(x, y)
        return [weakref.ref(owned), weakref.ref(x), weakref.ref(y)]

    with no_collector():
        return {name: count_after(lambda call=call: use(call)) for name, call in CALLS.items()}


@register_aspect
def objects_after_calls_of_new_shapes():
    """A shape that was never used before is a new kind of call."""
    sizes = iter(range(100, 10_000))

    def use(call):
        owned, size = Owned(), 2 * next(sizes)
        x, y = torch.ones(size), torch.ones(size)
        call(x, y)
        return [weakref.ref(owned), weakref.ref(x), weakref.ref(y)]

    any_shape = ("all_reduce", "all_reduce_async", "broadcast", "all_to_all_single", "functional")
    with no_collector():
        return {name: count_after(lambda name=name: use(CALLS[name])) for name in any_shape}


@register_aspect
def objects_of_other_threads():
    """What a thread owns while another one makes calls, in turns."""
    turn, answer, stop = threading.Event(), threading.Event(), threading.Event()
    small = torch.ones(3)

    def serve():
        while True:
            turn.wait()
            turn.clear()
            if stop.is_set():
                return
            dist.all_reduce(small)
            answer.set()

    def own():
        owned, x = Owned(), torch.ones(64)
        dist.all_reduce(small)
        turn.set()
        answer.wait()
        answer.clear()
        return [weakref.ref(owned), weakref.ref(x)]

    thread = threading.Thread(target=serve)
    thread.start()
    with no_collector():
        count = count_after(own)
    stop.set()
    turn.set()
    thread.join()
    return count


@register_aspect
def objects_of_training():
    """Models, optimizers and groups after their last use."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def train_ddp():
        model = DistributedDataParallel(nn.Linear(8, 8))
        return train(model, model)

    def train_fsdp2():
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        fully_shard(model)
        return train(model, model)

    def train(model, owner):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        activations = []
        for _ in range(3):
            out = model(torch.ones(4, 8))
            activations.append(weakref.ref(out))
            out.sum().backward()
            optimizer.step()
        return [*activations, weakref.ref(optimizer), weakref.ref(owner), weakref.ref(out)]

    def use_group():
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(3), group=group)
        dist.destroy_process_group(group)
        return [weakref.ref(group)]

    def use_work():
        work = dist.all_reduce(torch.ones(3), async_op=True)
        work.wait()
        return [weakref.ref(work)]

    def run_collected(function):
        """Torch's own models are parts of cycles."""
        references = function()
        gc.collect()
        return count_alive(references)

    report = {f.__name__: run_collected(f) for f in (train_ddp, train_fsdp2, use_group)}
    with no_collector():
        report["work"] = count_after(use_work)
        report["group"] = count_after(use_group)
    return report


def reset_peak():
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return read_memory("VmRSS")


def read_memory(name):
    """The value in MB."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(name + ":"))
    return int(line.split()[1]) / 1024


def find_peak(function):
    """The largest growth of memory in MB, the least of several runs: the backend's own threads
    may be late.
    """
    function()
    peaks = []
    for _ in range(3):
        before = reset_peak()
        function()
        peaks.append(read_memory("VmHWM") - before)
    return measure(round(min(peaks)), 16)


@register_aspect
def peak_of_temporaries():
    """Each step communicates a tensor of its own that it drops; garbage is collected as by default."""
    extra = iter(range(1000))

    def use_sync():
        for _ in range(4):
            dist.all_reduce(torch.ones(8 * MB))
            time.sleep(SETTLE_S)

    def use_async():
        for _ in range(4):
            dist.all_reduce(torch.ones(8 * MB), async_op=True).wait()
            time.sleep(SETTLE_S)

    def use_new_shapes():
        for _ in range(4):
            x = torch.ones(8 * MB + next(extra))
            dist.all_reduce(x)
            del x
            time.sleep(0.12)  # as long as hangwatch's thread waits

    def use_pauses():
        for _ in range(4):
            x = torch.ones(8 * MB)
            dist.all_reduce(x)
            del x
            time.sleep(SETTLE_S)
            y = torch.ones(8 * MB)  # what the step does with the memory that it has back
            y.add_(1)
            del y

    return {f.__name__: find_peak(f) for f in (use_sync, use_async, use_new_shapes, use_pauses)}


@register_aspect
def peak_of_ddp():
    """Activations of 32 MB a step."""
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(nn.Sequential(nn.Linear(128, 128), nn.ReLU()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train():
        for _ in range(4):
            model(torch.ones(64 << 10, 128)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return find_peak(train)
