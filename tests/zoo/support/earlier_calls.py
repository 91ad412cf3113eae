"""The calls that a job has made before its fault, for the programs of the zoo: ``import earlier_calls``.

``EARLIER_CALLS`` says how many, ``EARLIER_CALLS_SEED`` which; the harness sets both, and without them there are
none. Every rank draws the same calls in the same order, and makes those in whose group or pair it is.
"""

import os
import random
from collections.abc import Callable

import torch
import torch.distributed as dist

COUNT = int(os.environ.get("EARLIER_CALLS", "0"))
SHAPES = ((1,), (64,), (64,), (8, 48), (4096,))
TAGS = (0, 0, 0, 1, 2)  # of messages, added to the first one
READ_EVERY = 150  # calls: how often a job on a GPU reads a value, for which its host waits
STEP_SHARE = 0.05  # of the calls are replaced by a training step, where the program has one

Pair = tuple[int, int]  # the global ranks of sender and receiver


def count(share: float = 1.0) -> int:
    """The number of calls to make; a program that makes them in several places gives each a share."""
    return round(COUNT * share)


def make(
    *places: dist.ProcessGroup | Pair | None,
    share: float = 1.0,
    step: Callable[[], object] | None = None,
    first_tag: int = 0,
) -> None:
    """Makes the drawn number of calls as fast as it can, in turn in all ``places``: this rank's own groups, or
    pairs of a sender and a receiver; None is the world, and the default. ``step`` is called now and then.
    """
    draw = random.Random(os.environ.get("EARLIER_CALLS_SEED", "0"))
    places = places or (None,)
    pending: list[dist.Work] = []
    total = count(share)
    for number in range(total):
        remaining = total - number
        # The last call in each place is one in which all members meet.
        place = places[-remaining] if remaining <= len(places) else draw.choice(places)
        is_last = remaining <= len(places)
        kind, variant = draw.random(), draw.randrange(1 << 30)
        if is_last:
            _await(pending)
        if step is not None and kind < STEP_SHARE and not is_last:
            step()
        elif isinstance(place, tuple):
            _exchange(place, variant, first_tag, pending)
        elif place is not dist.GroupMember.NON_GROUP_MEMBER:
            _communicate(place, 0 if is_last else kind, variant, pending)
        if number % READ_EVERY == READ_EVERY - 1:
            _await(pending)
            _synchronize()
    _await(pending)
    _synchronize()


def _synchronize() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no annotations for it
        torch.cuda.synchronize()


def _await(pending: list[dist.Work]) -> None:
    while pending:
        pending.pop(0).wait()


def _device(group: dist.ProcessGroup | None) -> str:
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"


def _exchange(pair: Pair, variant: int, first_tag: int, pending: list[dist.Work]) -> None:
    """One message from the sender to the receiver; some are awaited later."""
    rank, device = dist.get_rank(), _device(None)
    tag = first_tag + TAGS[variant % len(TAGS)]
    data = torch.ones(SHAPES[variant // 7 % len(SHAPES)], device=device)
    is_awaited_later = variant // 50 % 4 == 0 and device == "cpu"
    if rank not in pair:
        return
    if is_awaited_later:
        work = (
            dist.isend(data, dst=pair[1], tag=tag)
            if rank == pair[0]
            else dist.irecv(data, src=pair[0], tag=tag)
        )
        assert work is not None
        pending.append(work)
        return
    _await(pending)
    if rank == pair[0]:
        dist.send(data, dst=pair[1], tag=tag)
    else:
        dist.recv(data, src=pair[0], tag=tag)


def _communicate(
    group: dist.ProcessGroup | None, kind: float, variant: int, pending: list[dist.Work]
) -> None:
    """One collective. Most are all-reduces, as in training."""
    device, size = _device(group), dist.get_world_size(group)
    root = variant % size if group is None else dist.get_global_rank(group, variant % size)
    is_root = dist.get_rank() == root
    data = torch.ones(SHAPES[variant // 11 % len(SHAPES)], device=device)
    if kind < 0.35:
        dist.all_reduce(data, group=group)
    elif kind < 0.45:
        metrics = torch.ones(3, dtype=torch.int64, device=device)
        dist.all_reduce(metrics, op=dist.ReduceOp.MAX, group=group)
    elif kind < 0.6:
        work = dist.all_reduce(data, group=group, async_op=True)
        assert work is not None
        pending.append(work)
        if variant % 3 == 0:
            _await(pending)
    elif kind < 0.7:
        dist.broadcast(data, src=root, group=group)
    elif kind < 0.78:
        every = torch.empty(size * data.numel(), device=device)
        dist.all_gather_into_tensor(every, data.flatten(), group=group)
    elif kind < 0.86:
        shard = torch.empty(16, device=device)
        dist.reduce_scatter_tensor(shard, torch.ones(16 * size, device=device), group=group)
    elif kind < 0.9:
        parts = [torch.empty_like(data) for _ in range(size)]
        dist.all_gather(parts, data, group=group)
    elif kind < 0.94:
        tokens = torch.ones(4 * size, device=device)
        dist.all_to_all_single(torch.empty_like(tokens), tokens, group=group)
    elif kind < 0.96:
        dist.reduce(data, dst=root, group=group)
    elif kind < 0.98:
        gathered = [torch.empty_like(data) for _ in range(size)] if is_root else None
        dist.gather(data, gathered, dst=root, group=group)
    else:
        dist.barrier(group=group)
