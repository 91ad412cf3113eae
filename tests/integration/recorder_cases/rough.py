"""Uses a process as trainings do where it hurts: threads, forks, signals, groups that come and go,
and torch's own modes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import random
import signal
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, HashStore

CALLS, THREADS = 2000, 4
WORLDS = 700  # more than the ring has room for at a time


class Interrupted(BaseException):
    """What a signal handler raises, as KeyboardInterrupt is."""


def start() -> None:
    """A job of one rank, whose calls are complete at once."""
    dist.Backend.register_backend(
        "nothing",
        lambda _, rank, size, __: FakeProcessGroup._create_internal(rank, size),
        devices=["cpu"],
    )
    dist.init_process_group("nothing", store=HashStore(), rank=0, world_size=1)


def call(number: int, **told: Any) -> None:
    dist.all_reduce(torch.ones(1, 1 + number % 300), **told)


def threads() -> None:
    """Many at once in one group, in ever new shapes, while other groups come and go."""

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(CALLS):
            with torch.inference_mode(chance.random() < 0.3):
                call(chance.randrange(1 << 20))

    running = [threading.Thread(target=work, args=(seed,)) for seed in range(THREADS)]
    for thread in running:
        thread.start()
    for number in range(40):
        group = dist.new_group([0])
        call(number, group=group)
        handle = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        dist.destroy_process_group(group)
        del group, handle
        gc.collect()
    for thread in running:
        thread.join()
    assert entered("default_pg") == CALLS * THREADS, entered("default_pg")


def forks() -> None:
    """Children that end at once, that go on as they are, and that make a job of their own; a thread
    calls meanwhile.
    """
    stop = threading.Event()

    def work() -> None:
        number = 0
        while not stop.is_set():
            call(number := number + 1)

    thread = threading.Thread(target=work)
    thread.start()
    for number in range(12):
        pid = os.fork()
        if not pid:
            if number % 3 == 1:
                call(number)
            elif number % 3 == 2:
                dist.destroy_process_group()
                start()
                for again in range(100):
                    call(again)
            os._exit(number)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == number
    stop.set()
    thread.join()


def signals() -> None:
    """A handler that raises in the midst of a call: the program sees every one of its exceptions."""
    armed, raised, caught = False, 0, 0

    def handler(*_: Any) -> None:
        nonlocal armed, raised
        if armed:
            armed = False
            raised += 1
            raise Interrupted

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0007)
    for number in range(3000):
        x = torch.ones(1 + number % 50, 1 + number // 50)  # of a new shape each
        try:
            armed = True
            dist.all_reduce(x)
        except Interrupted:
            caught += 1
        armed = False
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert raised == caught, (raised, caught)
    assert raised > 20, raised


def modes() -> None:
    """What torch puts around or instead of a call."""
    import torch.distributed._functional_collectives as functional
    import torch.distributed.nn.functional as differentiable
    from torch._subclasses import FakeTensorMode
    from torch.profiler import ProfilerActivity, profile
    from torch.utils._python_dispatch import TorchDispatchMode

    class Passing(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    for _ in range(3):
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            call(0)
        assert any("c10d::allreduce_" in event.key for event in seen.key_averages())
        with torch.inference_mode():
            call(1)
        with FakeTensorMode(), torch.no_grad():
            call(2)
        with Passing():
            call(3)
        x = torch.ones(4, requires_grad=True)
        differentiable.all_reduce(x * 2).sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD).sum()
        torch.compile(
            lambda t: functional.all_reduce(t * 2, "sum", dist.group.WORLD) + 1, backend="aot_eager"
        )(torch.ones(5))
        dist.all_gather([torch.ones(2)], torch.ones(2))
        dist.broadcast(torch.ones(2, dtype=torch.complex64), 0)
        dist.all_reduce(torch.ones(2, 2).t())
        dist.all_gather_object([None], {"a": 1})
    assert entered("default_pg") == 3 * 13, entered(
        "default_pg"
    )  # all_gather_object makes two; backward makes one


def worlds() -> None:
    """The process group is destroyed and made anew, again and again; now and then somebody tries to
    make it twice.
    """
    for number in range(WORLDS):
        call(number)
        if number % 10 == 0:
            with contextlib.suppress(ValueError):
                start()
        dist.new_group([0])
        dist.destroy_process_group()
        with contextlib.suppress(TypeError):
            dist.init_process_group(
                "nothing", store=HashStore(), rank=0, world_size=1, timeout="soon"
            )  # an attempt that fails
        start()
    call(0)
    newest = [
        max((s for s in sequences() if s.group.desc == desc), key=lambda s: s.uid)
        for desc in ("process group set-up", "default_pg")
    ]
    assert [(s.group.world_size, s.group.generation, s.entered) for s in newest] == [
        (1, WORLDS + 1, 1)
    ] * 2, newest


def entered(desc: str) -> int:
    return max(s.entered for s in sequences() if s.group.desc == desc)


def sequences() -> Any:
    from hangwatch.ring.reader import RingReader

    recorded = current()
    recorded.ring.write_pulse(recorded.recorder.update_streams())
    return RingReader(recorded.ring.map).read_snapshot(time.monotonic_ns()).streams


def current() -> Any:
    from hangwatch.agent.recorder import rank

    found = rank.get_current_rank()
    assert found is not None
    return found


def main() -> None:
    faulthandler.dump_traceback_later(
        100, exit=True
    )  # before the test gives up on it: the stacks say where it hangs
    start()
    {"threads": threads, "forks": forks, "signals": signals, "modes": modes, "worlds": worlds}[
        sys.argv[1]
    ]()
    from hangwatch.agent.recorder import faults

    told = current()
    print(
        "recorder",
        "python" if told.recorder.native is None else "native",
        "faults",
        faults.format_lines(),
    )


if __name__ == "__main__":
    main()
