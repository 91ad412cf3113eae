"""Uses a process in the ways that are hardest for a recorder: threads, forks, signals, groups that are
created and destroyed, and torch's own modes.
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


def start_job() -> None:
    """Starts a job of one rank, whose calls complete immediately."""
    dist.Backend.register_backend(
        "nothing",
        lambda _, rank, size, __: FakeProcessGroup._create_internal(rank, size),
        devices=["cpu"],
    )
    dist.init_process_group("nothing", store=HashStore(), rank=0, world_size=1)


def make_call(number: int, **options: Any) -> None:
    dist.all_reduce(torch.ones(1, 1 + number % 300), **options)


def call_from_threads() -> None:
    """Many concurrent calls in one group, always of new shapes, while other groups are created and
    destroyed.
    """

    def run_calls(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(CALLS):
            with torch.inference_mode(chance.random() < 0.3):
                make_call(chance.randrange(1 << 20))

    running = [threading.Thread(target=run_calls, args=(seed,)) for seed in range(THREADS)]
    for thread in running:
        thread.start()
    for number in range(40):
        group = dist.new_group([0])
        make_call(number, group=group)
        handle = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        dist.destroy_process_group(group)
        del group, handle
        gc.collect()
    for thread in running:
        thread.join()
    from hangwatch.agent.recorder import faults

    entered = [s.entered for s in read_streams() if s.group.desc == "default_pg"]
    assert entered == [CALLS * THREADS], (entered, list(faults.fault_counts))


def call_around_forks() -> None:
    """Forks children that exit immediately, that continue the job, and that start their own job, while
    a thread makes calls.
    """
    stop = threading.Event()

    def run_calls() -> None:
        number = 0
        while not stop.is_set():
            make_call(number := number + 1)

    thread = threading.Thread(target=run_calls)
    thread.start()
    for number in range(12):
        pid = os.fork()
        if not pid:
            # The parent's timer is a thread, which the child does not have and cannot replace.
            faulthandler.register(signal.SIGALRM, chain=True)
            signal.alarm(60)
            if number % 3 == 1:
                make_call(number)
            elif number % 3 == 2:
                dist.destroy_process_group()
                start_job()
                for again in range(100):
                    make_call(again)
            os._exit(number)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == number
    stop.set()
    thread.join()


def list_functions_under_kernel() -> set[str]:
    """The names of the Python functions that the kernel in Python, or torch under it, calls."""
    names = set()

    def profile_call(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_back.f_code.co_name == "c10d_kernel":
            names.add(frame.f_code.co_name)

    dist.all_reduce(torch.ones(3))  # the first call of a kind is examined more closely
    sys.setprofile(profile_call)
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(3), async_op=True).wait()
    sys.setprofile(None)
    return names


def interrupt_calls() -> None:
    """A signal handler raises during calls: the program gets each of its exceptions."""
    # A handler may run at each of these. Inside torch, its exception would become another one.
    assert list_functions_under_kernel() <= {"enter_call", "leave_call", "add_pending_call"}
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


def call_inside_modes() -> None:
    """Calls inside the modes with which torch wraps or replaces operators."""
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
            make_call(0)
        assert any("c10d::allreduce_" in event.key for event in seen.key_averages())
        with torch.inference_mode():
            make_call(1)
        with FakeTensorMode(), torch.no_grad():
            make_call(2)
        with Passing():
            make_call(3)
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
    assert count_entered("default_pg") == 3 * 12, count_entered(
        "default_pg"
    )  # all_gather_object makes two; backward makes one; fake tensors make none


def recreate_groups() -> None:
    """Destroys and recreates the process group many times, sometimes trying to create it twice."""
    for number in range(WORLDS):
        make_call(number)
        if number % 10 == 0:
            with contextlib.suppress(ValueError):
                start_job()
        dist.new_group([0])
        dist.destroy_process_group()
        with contextlib.suppress(TypeError):
            dist.init_process_group(
                "nothing", store=HashStore(), rank=0, world_size=1, timeout="soon"
            )  # an attempt that fails
        start_job()
    make_call(0)
    newest = [
        max((s for s in read_streams() if s.group.desc == desc), key=lambda s: s.uid)
        for desc in ("process group set-up", "default_pg")
    ]
    assert [(s.group.world_size, s.group.generation, s.entered) for s in newest] == [
        (1, WORLDS + 1, 1)
    ] * 2, newest


def count_entered(desc: str) -> int:
    return max(s.entered for s in read_streams() if s.group.desc == desc)


def read_streams() -> Any:
    from hangwatch.ring.reader import RingReader

    recorded = get_current_rank()
    recorded.ring.write_pulse(recorded.recorder.update_streams())
    return RingReader(recorded.ring.map).read_snapshot(time.monotonic_ns()).streams


def get_current_rank() -> Any:
    from hangwatch.agent.recorder import installation

    current_rank = installation.current_rank
    assert current_rank is not None
    return current_rank


def main() -> None:
    faulthandler.dump_traceback_later(
        100, exit=True
    )  # before the test gives up on it: the stacks say where it hangs
    start_job()
    {
        "threads": call_from_threads,
        "forks": call_around_forks,
        "signals": interrupt_calls,
        "modes": call_inside_modes,
        "worlds": recreate_groups,
    }[sys.argv[1]]()
    from hangwatch.agent.recorder import faults

    current_rank = get_current_rank()
    print(
        "recorder",
        "python" if current_rank.recorder.native is None else "native",
        "faults",
        list(faults.fault_counts),
    )


if __name__ == "__main__":
    main()
