"""The limit on the server's memory, and whose stacks are dropped near it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hangwatch.model.calls import Call, Signature, StreamKind
from hangwatch.model.ranks import Frame, ThreadStack
from hangwatch.protocol import heartbeat
from hangwatch.protocol.heartbeat import StreamIdentity, StreamUpdate
from hangwatch.server.core.limits import MAX_MEMORY_BYTES
from hangwatch.server.core.memory import (
    MIN_SAMPLE_BYTES,
    drop_samples,
    find_largest_family,
    find_memory_limit,
)
from hangwatch.tracking.fleet import Fleet
from hangwatch.tracking.process import (
    MAX_FILE_CHARS,
    MAX_FRAMES_KEPT,
    MAX_FUNCTION_CHARS,
    MAX_SAMPLE_FRAMES,
    MAX_THREADS_KEPT,
    Process,
    StackSample,
)
from tests.simulation.simulated_job import SimulatedJob

GIB = 1 << 30


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": f"{2 * GIB}"}, 1.5 * GIB),
        ("0::/host/path\n", {"memory.max": f"{GIB}"}, 0.75 * GIB),
        ("5:cpu:/c\n4:memory:/c\n", {"memory/c/memory.limit_in_bytes": f"{GIB}"}, 0.75 * GIB),
        ("0::/a\n", {"a/memory.max": "max"}, 3 * GIB),
        ("0::/a\n", {"a/memory.max": f"{64 * GIB}"}, 3 * GIB),
        ("", {}, 3 * GIB),
        (None, {}, MAX_MEMORY_BYTES),
    ],
    ids=["v2", "container", "v1", "machine", "machine has less", "no group", "nothing known"],
)
def test_limit_is_that_of_the_control_group_or_the_machine(
    tmp_path: Path, cgroup: str | None, files: dict[str, str], expected: float
) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    if cgroup is not None:
        (proc / "self").mkdir(parents=True)
        (proc / "self" / "cgroup").write_text(cgroup)
        (proc / "meminfo").write_text(f"MemTotal:    {4 * GIB >> 10} kB\nMemFree: 1 kB\n")
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    assert find_memory_limit(proc, root) == expected


def add_job(fleet: Fleet, name: str, samples: int, frames: int) -> Process:
    """A job with a rank of so many samples, taken at 0, 1, 2 and so on."""
    job = SimulatedJob(ranks=1, name=name, host=name)
    updates = job.make_process_updates(0, full=True)
    beat = heartbeat.Heartbeat(host=name, agent=name, number=1, processes=updates)
    fleet.apply_heartbeat(beat, 0.0)
    texts = {"function": "f" * MAX_FUNCTION_CHARS, "file": "t" * MAX_FILE_CHARS}
    stack = tuple(Frame(**texts, line=n) for n in range(frames))
    threads = [
        ThreadStack(thread="MainThread", frames=stack[start : start + 500])
        for start in range(0, frames, 500)
    ]
    for number in range(samples):
        reply = heartbeat.StackReply(
            key=updates[0].key, request="r", source="py-spy", threads=tuple(threads)
        )
        beat = replace(beat, number=number + 2, processes=(), samples=(reply,))
        fleet.apply_heartbeat(beat, float(number))
    (process,) = fleet.list_processes(name)
    return process


def test_greediest_job_loses_its_oldest_stacks() -> None:
    """SECURITY.md: "the job with the most loses its oldest stacks first"."""
    fleet = Fleet()
    modest = add_job(fleet, "modest", 4, 30)
    greedy = [add_job(fleet, f"greedy/{n}", 3, MAX_SAMPLE_FRAMES) for n in range(2)]
    second = add_job(fleet, "second", 2, MAX_SAMPLE_FRAMES)
    one_sample = second.samples[0].size_bytes
    assert one_sample > MAX_SAMPLE_FRAMES * (MAX_FUNCTION_CHARS + MAX_FILE_CHARS)
    assert drop_samples(fleet.processes.values(), one_sample) == {"greedy": 1}
    assert drop_samples(fleet.processes.values(), 2 * one_sample) == {"greedy": 2}
    assert sorted(sample.taken_at for process in greedy for sample in process.samples) == [1, 2, 2]
    assert len(second.samples) == 2
    dropped = drop_samples(fleet.processes.values(), 1 << 40)
    assert dropped.keys() == {"greedy", "second"}
    for processes in (greedy, [second]):
        kept_bytes = sum(sample.size_bytes for p in processes for sample in p.samples)
        assert kept_bytes <= MIN_SAMPLE_BYTES
    assert len(modest.samples) == 4, "a job with few stacks keeps all"


def test_largest_job_is_found_by_its_processes_groups_and_calls() -> None:
    fleet = Fleet()
    assert find_largest_family(fleet) is None
    add_job(fleet, "modest", 0, 0)
    assert find_largest_family(fleet) is None, "all are small"

    def report(name: str, **changes: Any) -> None:
        job = SimulatedJob(ranks=1, name=name, host=name)
        (update,) = job.make_process_updates(0, full=True)
        update = replace(update, **changes)
        beat = heartbeat.Heartbeat(host=name, agent=name, number=1, processes=(update,))
        fleet.apply_heartbeat(beat, 0.0)

    def make_streams(count: int, ranks: str, calls: tuple[Call, ...]) -> Iterator[StreamUpdate]:
        for uid in range(1, count + 1):
            group = StreamIdentity(
                kind=StreamKind.COLLECTIVE, name=f"{uid}", desc="", ranks=ranks.format(uid)
            )
            yield StreamUpdate(uid, 1, calls=calls, identity=group)

    report("streams", streams=tuple(make_streams(10_000, "0", ())))
    assert find_largest_family(fleet) == "streams"
    report("members", streams=tuple(make_streams(3, "0-20000{}", ())))
    assert find_largest_family(fleet) == "members"
    shapes = Signature(op="all_to_all", shapes=((1,) * 1000,) * 1000)
    report("calls/1", streams=tuple(make_streams(1, "0", (Call(seq=1, signature=shapes),))))
    assert find_largest_family(fleet) == "calls"


def take_sample(*threads: ThreadStack) -> StackSample:
    reply = heartbeat.StackReply(key="1-1", request="r", source="py-spy", threads=threads)
    return StackSample.from_reply(reply, 0.0)


def test_more_frames_than_a_node_agent_sends_are_cut() -> None:
    frames = tuple(Frame(function="f", file="t.py", line=n) for n in range(MAX_FRAMES_KEPT + 1))
    sample = take_sample(ThreadStack(thread="t", frames=frames))
    assert sample.threads[0].frames == frames[:-1], "the innermost ones are kept"
    sample = take_sample(*[ThreadStack(thread="t", frames=frames)] * (MAX_THREADS_KEPT + 1))
    assert len(sample.threads) == MAX_THREADS_KEPT
    assert sum(len(thread.frames) for thread in sample.threads) == MAX_SAMPLE_FRAMES


def test_long_texts_of_frames_are_cut() -> None:
    long = "/x" * 9999
    frame = Frame(function=long, file=f"{long}/t.py", line=1, text=long, handler=long, polls=long)
    usual = Frame(function="f", file="/t.py", line=1, text="wait()")
    sample = take_sample(ThreadStack(thread=long, frames=(frame, usual), error=long))
    (thread,) = sample.threads
    assert thread.frames[1] is usual
    cut = thread.frames[0]
    assert cut.file.endswith("/t.py"), "which shows that it is the user's"
    texts = (cut.function, cut.file, cut.text, cut.handler, cut.polls, thread.thread, thread.error)
    assert all(text is not None and len(text) <= MAX_FILE_CHARS for text in texts)
    assert sample.size_bytes > 4 * MAX_FILE_CHARS, "all texts count"
