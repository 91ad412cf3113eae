"""Captures and replays graphs of a class that has torch's interface and no device, and prints what the
ring then shows, as JSON: for each case, the operation and the detail of each call of each stream.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, HashStore

from hangwatch.agent.recorder import faults, graphs, kernels
from hangwatch.agent.recorder.calls import CallReader
from hangwatch.agent.recorder.native.library import NativeLibrary, choose_recorder
from hangwatch.agent.recorder.recorder import Recorder
from hangwatch.agent.recorder.streams import CompletionMode
from hangwatch.agent.recorder.writer import RingWriter
from hangwatch.ring.reader import RingReader

Result = dict[str, Any]
CASES: dict[str, Callable[[], Result | None]] = {}


def register_case(function: Callable[[], Result | None]) -> Callable[[], Result | None]:
    CASES[function.__name__] = function
    return function


class Graph:
    """A graph whose replays only count."""

    replay_count = 0
    is_invalid = False

    def capture_begin(self, pool: Any = None) -> None:
        pass

    def capture_end(self) -> None:
        if self.is_invalid:
            raise RuntimeError("capture failed")

    def reset(self) -> None:
        pass

    def replay(self) -> None:
        self.replay_count += 1


def capture(work: Callable[[], object], graph: Any = None) -> Any:
    graph = graph or Graph()
    graph.capture_begin(pool=None)
    work()
    graph.capture_end()
    return graph


def reduce(size: int = 4, group: Any = None) -> None:
    dist.all_reduce(torch.ones(size), group=group)


def gather(group: Any = None) -> None:
    dist.all_gather_into_tensor(torch.ones(8), torch.ones(4), group=group)


def reduce_and_gather() -> None:
    reduce()
    reduce()
    gather()


def run_in_thread(work: Callable[[], object], name: str) -> None:
    """Runs the work in a thread of this name, which remains."""
    is_done = threading.Event()

    def run() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
        work()
        is_done.set()
        threading.Event().wait()

    threading.Thread(target=run, daemon=True).start()
    is_done.wait()


@register_case
def replays() -> None:
    graph = capture(reduce_and_gather)
    graph.replay()
    reduce()
    graph.replay()


@register_case
def replay_of_equal_and_other_graphs() -> None:
    for work in (reduce, reduce, lambda: reduce(5)):
        capture(work).replay()


@register_case
def groups() -> None:
    other = dist.new_group([0, 1], group_desc="other")

    def work() -> None:
        reduce()
        reduce(group=other)
        reduce()

    capture(work).replay()


@register_case
def no_collective() -> Result:
    graph = capture(lambda: None)
    graph.replay()
    return {"known": len(graphs._graphs), "replays": graph.replay_count}


@register_case
def message() -> None:
    """The messages of a graph are captured, and its replays are not calls of their channel."""
    capture(lambda: dist.send(torch.ones(4), 1)).replay()


@register_case
def other_threads() -> None:
    def work() -> None:
        reduce()
        run_in_thread(gather, "pt_autograd_0")
        run_in_thread(reduce, "prefetcher")

    capture(work).replay()


@register_case
def calls_of_the_cpu() -> None:
    def work() -> None:
        reduce()
        State.is_on_device = False
        try:
            gather(State.cpu_group)
        finally:
            State.is_on_device = True

    State.cpu_group = dist.new_group([0, 1], group_desc="cpu")
    capture(work).replay()


@register_case
def captured_again() -> None:
    graph = capture(reduce)
    graph.replay()
    graph.reset()
    graph.replay()
    capture(gather, graph)
    graph.replay()


@register_case
def capture_that_fails() -> None:
    graph = Graph()
    graph.is_invalid = True
    try:
        capture(reduce, graph)
    except RuntimeError:
        graph.replay()


@register_case
def replay_that_fails() -> Result:
    graph = capture(reduce)
    graph.replay()
    graph.replay_count = None  # the next one raises
    try:
        graph.replay()
    except TypeError as error:
        return {"raised": str(error)}
    return {}


@register_case
def own_error() -> Result:
    graph = capture(reduce)
    plan_calls = State.recorder.plan_calls
    State.recorder.plan_calls = None  # type: ignore[assignment, method-assign]
    try:
        graph.replay()
    finally:
        State.recorder.plan_calls = plan_calls  # type: ignore[method-assign]
    graph.replay()
    found = dict(faults.fault_counts)
    faults.fault_counts.clear()
    return {"replays": graph.replay_count, "faults": found}


@register_case
def own_error_in_capture() -> Result:
    read_captured_groups = graphs._read_captured_groups
    graphs._read_captured_groups = None  # type: ignore[assignment]
    try:
        graph = capture(reduce)
    finally:
        graphs._read_captured_groups = read_captured_groups
    graph.replay()
    found = dict(faults.fault_counts)
    faults.fault_counts.clear()
    return {"replays": graph.replay_count, "faults": found}


@register_case
def outdated_plan() -> None:
    """Interned signatures will be overwritten, so that the plan must be made again."""
    graph = capture(reduce)
    graph.replay()
    State.recorder.clear_caches()
    graph.replay()


@register_case
def deleted_group() -> Result:
    groups = [dist.new_group([0, 1], group_desc="other")]

    def work() -> None:
        reduce()
        reduce(group=groups[0])

    graph = capture(work)
    graph.replay()
    alive = weakref.ref(groups[0])
    dist.destroy_process_group(groups.pop())
    graph.replay()
    return {"alive": alive() is not None}


@register_case
def deleted_graph() -> Result:
    graph = capture(reduce)
    graph.replay()
    before = len(graphs._graphs), len(graphs._plans)
    alive = weakref.ref(graph)
    del graph
    return {
        "before": before,
        "after": (len(graphs._graphs), len(graphs._plans)),
        "alive": alive() is not None,
    }


@register_case
def more_calls_than_the_ring_holds() -> Result:
    def work() -> None:
        for _ in range(2001):
            reduce()

    capture(work).replay()
    found = list(faults.fault_counts)
    faults.fault_counts.clear()
    return {"faults": found}


@register_case
def interrupted() -> Result:
    """A signal arrives while the recorder searches the line of a replay."""
    graph = capture(reduce)
    sites = State.recorder.sites

    def raise_interrupt(_: object) -> int:
        raise KeyboardInterrupt

    sites.find_site = raise_interrupt  # type: ignore[method-assign, assignment]
    raised = ""
    try:
        graph.replay()
    except KeyboardInterrupt as error:
        raised = type(error).__name__
    del sites.find_site
    graph.replay()
    return {"raised": raised, "replays": graph.replay_count}


class State:
    recorder: Recorder
    is_on_device = True
    cpu_group: Any = None


def read_streams(ring: RingWriter) -> dict[str, Any]:
    """The calls of each stream by its description, and the first uncertain one."""
    State.recorder.update_streams()
    reader = RingReader(ring.map)
    streams = {}
    for stream in reader.read_snapshot(time.monotonic_ns()).streams:
        calls = reader.read_calls(stream.uid, time.monotonic_ns(), max_calls=100)
        streams[stream.group.desc + ("" if stream.peer is None else f" {stream.kind.value}")] = {
            "calls": [(call.signature.op, call.signature.detail) for call in calls],
            "agree": [call.signature.agree for call in calls],
            "lines": [call.site.function if call.site else None for call in calls],
            "completed": stream.completed,
            "loss": None if stream.loss is None else stream.loss.from_seq,
        }
    return streams


def run_case(name: str, folder: Path, native: NativeLibrary | None) -> Result:
    ring = RingWriter(folder / f"{name}.ring", pid=os.getpid(), start_ticks=1)
    ring.write_identity({"rank": 0})
    State.recorder = Recorder(ring, native)
    kernels.set_recorder(State.recorder)
    dist.init_process_group("nothing", store=HashStore(), rank=0, world_size=2)
    try:
        result = CASES[name]() or {}
        return {"streams": read_streams(ring)} | result
    finally:
        kernels.set_recorder(None)
        dist.destroy_process_group()


def main() -> None:
    """Runs the cases with the recorder of the environment, in rings of this folder."""
    gc.disable()
    native, reason = choose_recorder(os.environ)
    if native is None and os.environ["HANGWATCH_RECORDER"] == "native":
        sys.exit(reason)
    dist.Backend.register_backend(
        "nothing",
        lambda _, rank, size, __: FakeProcessGroup._create_internal(rank, size),
        devices=["cpu"],
    )
    find_completion = CallReader._find_completion

    def find_as_on_nccl(self: CallReader, track: Any, stream: Any, *args: Any) -> Any:
        if not State.is_on_device:
            return find_completion(self, track, stream, *args)
        stream.mark_completion_unknown()
        return 0, False, CompletionMode.UNOBSERVABLE

    CallReader._find_completion = find_as_on_nccl  # type: ignore[method-assign, assignment]
    graphs.track_graphs(Graph)
    print(json.dumps({name: run_case(name, Path(sys.argv[1]), native) for name in CASES}))


if __name__ == "__main__":
    main()
