"""Makes the recorder of this process fail to record calls, and prints what its ring shows of each
stream as JSON: (description, number of calls, (first uncertain call, reason) or null).
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, HashStore

import hangwatch
from hangwatch.agent.recorder import kernels
from hangwatch.agent.recorder.callers import CallSites
from hangwatch.agent.recorder.calls import CallReader
from hangwatch.agent.recorder.groups import GroupRegistry
from hangwatch.agent.recorder.python_kernel import get_recorder
from hangwatch.ring.reader import RingReader

CASES: dict[str, Callable[[], None]] = {}


def register_case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def start_job() -> None:
    """Starts a job of two ranks in one process, whose calls complete immediately."""
    dist.Backend.register_backend(
        "nothing",
        lambda _, rank, size, __: FakeProcessGroup._create_internal(rank, size),
        devices=["cpu"],
    )
    dist.init_process_group("nothing", store=HashStore(), rank=0, world_size=2)


@contextlib.contextmanager
def failing(owner: Any, name: str) -> Iterator[None]:
    """Lets a function of the recorder fail."""
    with mock.patch.object(owner, name, side_effect=OSError("injected")):
        yield


def reduce(size: int, group: Any = None) -> None:
    dist.all_reduce(torch.ones(size), group=group)


def send(size: int, tag: int, group: Any = None) -> None:
    dist.send(torch.ones(size), 1, tag=tag, group=group)


@register_case
def collective() -> None:
    """A known group: only its stream is incomplete, from its third call on."""
    other = dist.new_group([0, 1], group_desc="other")
    reduce(1)
    reduce(2)
    reduce(1, other)
    with failing(CallReader, "_intern_signature"):
        reduce(3)
    reduce(1)
    reduce(1)
    reduce(1, other)


@register_case
def message() -> None:
    """A send: the channels of its group are incomplete, also those that are opened later."""
    other = dist.new_group([0, 1], group_desc="other")
    reduce(1)
    send(1, tag=1)
    send(1, tag=1, group=other)
    with failing(CallReader, "_intern_signature"):
        send(2, tag=2)
    send(1, tag=1)
    send(1, tag=3)


@register_case
def first_call() -> None:
    """The first call of a group, whose stream is opened by the next one."""
    other = dist.new_group([0, 1], group_desc="other")
    reduce(1)
    with failing(CallReader, "_intern_signature"):
        reduce(2, other)
    reduce(1, other)


@register_case
def unknown_group() -> None:
    """The group of the lost call is not known: all streams are incomplete, and those opened later."""
    other = dist.new_group([0, 1], group_desc="other")
    reduce(1)
    with failing(GroupRegistry, "open_group"):
        reduce(1, other)
    reduce(1)
    reduce(1, other)


@register_case
def creation_of_a_group() -> None:
    reduce(1)
    with failing(CallSites, "find_site"):
        dist.new_group([0, 1])
    dist.new_group([0, 1])
    reduce(1)


@register_case
def declared_call() -> None:
    reduce(1)
    with failing(CallSites, "find_site"), hangwatch.collective("put"):
        pass
    reduce(1)


@register_case
def detached() -> None:
    """Calls were made while the kernels had no recorder."""
    reduce(1)
    attached = get_recorder()
    kernels.set_recorder(None)
    if attached is not None and attached.native is not None:
        attached.native.lib.hw_set_current_recorder(None)
    reduce(1)
    kernels.set_recorder(attached)
    reduce(1)


@register_case
def nothing_lost() -> None:
    reduce(1)
    send(1, tag=1)
    reduce(1)


def main() -> None:
    start_job()
    CASES[sys.argv[1]]()
    (path,) = Path(os.environ["HANGWATCH_RUN_DIR"]).rglob(f"{os.getpid()}-*.ring")
    time.sleep(0.3)  # the poller publishes the number of lost calls
    with path.open("rb") as file:
        reader = RingReader(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    snapshot = reader.read_snapshot(time.monotonic_ns())
    streams = [
        (
            stream.group.desc,
            stream.kind.value,
            stream.tag,
            stream.entered,
            stream.loss and (stream.loss.from_seq, stream.loss.reason.name),
        )
        for stream in snapshot.streams
    ]
    print(json.dumps({"recorder": snapshot.identity["recorder"], "streams": streams,
                      "dropped": snapshot.dropped, "opened": snapshot.opened}))  # fmt: skip


if __name__ == "__main__":
    main()
