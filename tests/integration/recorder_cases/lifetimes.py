"""A two-rank job that makes calls of every kind without the garbage collector, and checks that each
lets go of its tensors and objects as soon as torch does.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# gloo's own thread drops its reference a moment after it has reported a call as complete.
MAX_WAIT_S = 5.0


class Track:
    """Weak references to the objects of one case."""

    def __init__(self) -> None:
        self._refs: list[tuple[str, weakref.ref[Any]]] = []

    def add(self, tracked: Any, what: str) -> Any:
        self._refs.append((what, weakref.ref(tracked)))
        return tracked

    def make_tensor(self, size: int = 1000, what: str = "tensor") -> torch.Tensor:
        tensor: torch.Tensor = self.add(torch.ones(size), what)
        return tensor

    def find_survivors(self) -> list[str]:
        end = time.monotonic() + MAX_WAIT_S
        while (left := [what for what, ref in self._refs if ref() is not None]) and (
            time.monotonic() < end
        ):
            time.sleep(0.001)
        return left


CASES: list[Callable[[Track], None]] = []


def register_case(case: Callable[[Track], None]) -> Callable[[Track], None]:
    CASES.append(case)
    return case


def get_peer() -> int:
    return 1 - dist.get_rank()


@register_case
def blocking(track: Track) -> None:
    dist.all_reduce(track.make_tensor())


@register_case
def blocking_of_new_shapes(track: Track) -> None:
    for size in range(2000, 2010):
        dist.all_reduce(track.make_tensor(size))


@register_case
def blocking_of_other_kinds(track: Track) -> None:
    dist.broadcast(track.make_tensor(), 0)
    dist.all_gather([track.make_tensor() for _ in range(2)], track.make_tensor())
    dist.all_gather_into_tensor(track.make_tensor(2000), track.make_tensor())
    dist.reduce_scatter_tensor(track.make_tensor(), track.make_tensor(2000))
    dist.all_to_all_single(track.make_tensor(), track.make_tensor())
    dist.reduce(track.make_tensor(), 0)
    dist.barrier()


@register_case
def waited_for(track: Track) -> None:
    works = [dist.all_reduce(track.make_tensor(), async_op=True) for _ in range(3)]
    for work in works:
        track.add(work, "work")
        work.wait()


@register_case
def dropped(track: Track) -> None:
    """The recorder in Python holds these until the first call or poll after they are complete."""
    for _ in range(3):
        dist.all_reduce(track.make_tensor(), async_op=True)
    dist.barrier()
    dist.barrier()


@register_case
def future(track: Track) -> None:
    """The Work is dropped before the call is complete, as by a communication hook of DDP."""
    dist.all_reduce(track.make_tensor(), async_op=True).get_future().wait()
    dist.barrier()
    dist.barrier()


@register_case
def messages(track: Track) -> None:
    if dist.get_rank() == 0:
        dist.send(track.make_tensor(), get_peer())
        dist.recv(track.make_tensor(), get_peer())
    else:
        dist.recv(track.make_tensor(), get_peer())
        dist.send(track.make_tensor(), get_peer())


@register_case
def asynchronous_messages(track: Track) -> None:
    works = [
        dist.isend(track.make_tensor(), get_peer()),
        dist.irecv(track.make_tensor(), get_peer()),
    ]
    for work in works:
        work.wait()


@register_case
def dropped_message(track: Track) -> None:
    """A send that is never awaited and never received."""
    if dist.get_rank() == 0:
        sent = track.make_tensor()
        dist.isend(sent, get_peer(), tag=5)  # no later message has this tag
        dist.barrier()
        dist.send(torch.ones(1), get_peer(), tag=7)
    else:
        dist.barrier()
        dist.recv(torch.ones(1), get_peer(), tag=7)


@register_case
def batched_messages(track: Track) -> None:
    operations = [
        dist.P2POp(dist.isend, track.make_tensor(), get_peer()),
        dist.P2POp(dist.irecv, track.make_tensor(), get_peer()),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


class Payload:
    def __init__(self) -> None:
        self.tensor = torch.ones(100)


@register_case
def objects(track: Track) -> None:
    mine = track.add(Payload(), "object")
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, mine)
    for received in gathered:
        track.add(received, "received object")
    shared = [mine if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared, 0)


@register_case
def coalesced(track: Track) -> None:
    from torch.distributed.distributed_c10d import _coalescing_manager

    with _coalescing_manager():
        for _ in range(3):
            dist.all_reduce(track.make_tensor())
    with _coalescing_manager(async_ops=True) as manager:
        for _ in range(3):
            dist.all_reduce(track.make_tensor())
    manager.wait()


@register_case
def premultiplied(track: Track) -> None:
    """A reduce op that holds a tensor. gloo refuses it."""
    factor = track.make_tensor(1, "factor")
    operation = dist._make_nccl_premul_sum(factor)
    for _ in range(2):
        with contextlib.suppress(RuntimeError, ValueError):
            dist.all_reduce(torch.ones(3), op=operation)


@register_case
def raised(track: Track) -> None:
    with contextlib.suppress(RuntimeError, ValueError):
        dist.all_reduce(track.make_tensor(), op=dist.ReduceOp.AVG)
    with contextlib.suppress(RuntimeError, ValueError):
        dist.all_gather([track.make_tensor(3), track.make_tensor(4)], track.make_tensor(5))


class Doubling(torch.autograd.Function):
    """Saves a tensor for the backward pass, as a layer saves its activations."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, track: Track) -> torch.Tensor:
        activation: torch.Tensor = track.add(x * 2, "activation")
        ctx.save_for_backward(activation)
        return activation.sum(1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (activation,) = ctx.saved_tensors
        return torch.ones_like(activation) * 2, None


@register_case
def data_parallel(track: Track) -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    for _ in range(3):
        loss = Doubling.apply(model(track.make_tensor(32).view(4, 8)), track)
        loss.sum().backward()  # type: ignore[no-untyped-call]
        model.zero_grad()


@register_case
def threads(track: Track) -> None:
    """Two threads take turns; each is in a function with a tensor while the other makes a call."""
    turns = [threading.Semaphore(1), threading.Semaphore(0)]

    def call_once(number: int) -> None:
        tensor = track.make_tensor()
        turns[number].acquire()
        dist.all_reduce(tensor)
        turns[1 - number].release()

    def make_calls(number: int) -> None:
        for _ in range(6):
            call_once(number)

    thread = threading.Thread(target=make_calls, args=(1,))
    thread.start()
    make_calls(0)
    thread.join()


def stop_polling() -> None:
    """Ends the recorder's thread, whose polls would hide what a call leaves behind."""
    rank = sys.modules.get("hangwatch.agent.recorder.installation")
    current = rank.current_rank if rank is not None else None
    if current is not None:
        current.poller.stop_thread()
    kind = "none" if current is None else "native" if current.recorder.native else "python"
    if dist.get_rank() == 0:
        print("recorder", kind, flush=True)


def main() -> None:
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(3))
    stop_polling()
    gc.collect()
    gc.disable()
    for case in CASES:
        track = Track()
        case(track)
        left = track.find_survivors()
        if left:
            sys.stdout.write(f"{case.__name__}: {', '.join(left)}\n")
        dist.barrier()
    # One write, since both ranks share a file and torchrun starts Python without buffers.
    sys.stdout.write(f"checked {len(CASES)}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
