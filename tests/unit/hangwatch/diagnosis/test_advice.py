"""How a thread's activity is derived from its stack and described in a verdict's advice; and the
workers that a rank waits for.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from hangwatch.agent.node.stacks import sampler
from hangwatch.agent.node.stacks.pyspy import PySpy, locate_pyspy
from hangwatch.agent.node.system.processes import TICKS_PER_S, ThreadStacks
from hangwatch.agent.node.system.transfers import TransferMeter
from hangwatch.model.calls import Site
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.ranks import ExceptionInfo, Frame, Lifecycle, ThreadStack
from hangwatch.protocol import heartbeat
from hangwatch.stacks.activities import classify_activity
from tests.simulation.scripted_job import ScriptedJob
from tests.unit.agent.node.system.test_processes import add_process

PYTHON_LIB = "/usr/lib/python3.11"
TORCH_LIB = f"{PYTHON_LIB}/site-packages/torch"
USER_FRAME = Frame(function="main", file="/home/me/train.py", line=3)


def make_stack(
    *frames: tuple[str, str],
    text: str | None = None,
    user: Frame = USER_FRAME,
    active: bool = False,
) -> ThreadStack:
    """Library frames as (function, file), innermost first, then the user's; ``text`` is the
    innermost line's.
    """
    made = [Frame(function=function, file=file, line=1) for function, file in frames] + [user]
    made[0] = Frame(
        function=made[0].function,
        file=made[0].file,
        line=made[0].line,
        text=text,
        handler=made[0].handler,
    )
    return ThreadStack(thread="MainThread", frames=tuple(made), main=True, active=active)


@pytest.mark.parametrize(
    ("frames", "says"),
    [
        ([("Condition.wait", f"{PYTHON_LIB}/threading.py"), ("Queue.get", f"{PYTHON_LIB}/queue.py")], "waits for an item of a queue"),
        ([("Event.wait", f"{PYTHON_LIB}/threading.py")], "waits for another thread"),
        ([("_wait_for_tstate_lock", f"{PYTHON_LIB}/threading.py"), ("Thread.join", f"{PYTHON_LIB}/threading.py")], "waits for a thread to end"),
        ([("Popen._try_wait", f"{PYTHON_LIB}/subprocess.py"), ("run", f"{PYTHON_LIB}/subprocess.py")], "waits for a child process to end"),
        ([("read_signed", f"{PYTHON_LIB}/multiprocessing/forkserver.py")], "waits for another process"),
        ([("Popen.poll", f"{PYTHON_LIB}/multiprocessing/popen_fork.py")], "waits for a child process to end"),
        ([("wait", f"{PYTHON_LIB}/threading.py"), ("Future.result", f"{PYTHON_LIB}/concurrent/futures/_base.py")],
         "waits for the result of a pool"),
        ([("SocketIO.readinto", f"{PYTHON_LIB}/socket.py"), ("urlopen", f"{PYTHON_LIB}/urllib/request.py")],
         "waits for an answer over the network"),
        (
            [
                ("_PollLikeSelector.select", f"{PYTHON_LIB}/selectors.py"),
                ("Queue.get", f"{PYTHON_LIB}/multiprocessing/queues.py"),
                ("_MultiProcessingDataLoaderIter._try_get_data", f"{TORCH_LIB}/utils/data/dataloader.py"),
                ("_BaseDataLoaderIter.__next__", f"{TORCH_LIB}/utils/data/dataloader.py"),
            ],
            "waits for a batch of its DataLoader",
        ),
        ([("FileBaton.wait", f"{TORCH_LIB}/utils/file_baton.py"), ("load", f"{TORCH_LIB}/utils/cpp_extension.py")],
         "waits for a lock file while it builds an extension"),
        ([("_save", f"{TORCH_LIB}/serialization.py"), ("save", f"{TORCH_LIB}/serialization.py")], "writes a checkpoint"),
        ([("_load", f"{TORCH_LIB}/serialization.py")], "reads a checkpoint"),
        ([("Event.wait", f"{PYTHON_LIB}/threading.py"), ("_compile", f"{TORCH_LIB}/_dynamo/convert_frame.py")],
         "waits for another thread while it compiles"),
        ([("compile_wrapper", f"{TORCH_LIB}/_dynamo/eval_frame.py")], ""),
        ([("destroy_process_group", f"{TORCH_LIB}/distributed/distributed_c10d.py")], "is in destroy_process_group"),
        ([("StreamHandler.emit", f"{PYTHON_LIB}/logging/__init__.py")], "logs"),
        ([("rpc_sync", f"{TORCH_LIB}/distributed/rpc/api.py"), ("wrapper", f"{TORCH_LIB}/distributed/rpc/api.py")],
         "waits for the reply of another rank"),
        ([("_store_based_barrier", f"{TORCH_LIB}/distributed/distributed_c10d.py"),
          ("init_rpc", f"{TORCH_LIB}/distributed/rpc/__init__.py")], "waits for other ranks in a rendezvous"),
        ([("rendezvous", f"{TORCH_LIB}/distributed/_symmetric_memory/__init__.py")], "waits for other ranks in a rendezvous"),
        ([("Condition.wait", f"{PYTHON_LIB}/multiprocessing/synchronize.py"), ("Barrier._wait", f"{PYTHON_LIB}/threading.py"),
          ("Barrier.wait", f"{PYTHON_LIB}/threading.py")], "waits at a barrier"),
        ([("Pdb.cmdloop", f"{PYTHON_LIB}/pdb.py")], "waits for user input"),
        ([("all_reduce", f"{TORCH_LIB}/distributed/distributed_c10d.py")], ""),
        ([("get", "/home/me/queue.py")], ""),
    ],
)  # fmt: skip
def test_library_frames(frames: list[tuple[str, str]], says: str) -> None:
    assert str(classify_activity(make_stack(*frames))) == says


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("with self.lock:", "waits for a lock"),
        ("mutex.acquire()", "waits for a lock"),
        ("with open(lock_path) as file:", "waits for a file"),
        ("fcntl.flock(file, fcntl.LOCK_EX)", "waits for a lock file"),
        ("data = connection.recv(64)", "waits for an answer over the network"),
        ("store.wait(['ready'])", "waits for a key of a store"),
        ("while store.add(name, 0) < size:", "waits for a key of a store"),
        ("comm.Barrier()", "waits at a barrier"),
        ("near, _ = listener.accept()", "waits for a connection"),
        ("time.sleep(5)", "sleeps"),
        ("embedding = reference.to_here()", "waits for the reply of another rank"),
        ("work.wait()", "waits for a Future or Work object of torch"),
        ("answer = input('go on? ')", "waits for user input"),
        ("print(loss)", "waits to print"),
        ("x = f(x)", ""),
    ],
)
def test_lines_that_wait_in_c_code(line: str, says: str) -> None:
    assert str(classify_activity(make_stack(text=line))) == says


def test_running_line_is_not_reported_as_waiting() -> None:
    assert not classify_activity(make_stack(text="print(loss)", active=True))


def test_frames_below_user_frame_show_location_not_wait() -> None:
    user = Frame(function="__getitem__", file="/home/me/data.py", line=9, text="time.sleep(9)")
    inner = ThreadStack(
        thread="MainThread",
        main=True,
        frames=(
            user,
            Frame(function="fetch", file=f"{TORCH_LIB}/utils/data/_utils/fetch.py", line=1),
            Frame(function="Queue.get", file=f"{PYTHON_LIB}/queue.py", line=1),
        ),
    )
    assert str(classify_activity(inner)) == "sleeps in the dataset of its DataLoader"
    assert not classify_activity(None)
    assert not classify_activity(ThreadStack(thread="MainThread", frames=()))


def test_exception_handler_is_named() -> None:
    user = Frame(
        function="report",
        file="/home/me/train.py",
        line=9,
        text="connection.recv(1)",
        handler="except OSError as e",
    )
    activity = classify_activity(ThreadStack(thread="MainThread", main=True, frames=(user,)))
    assert (
        str(activity)
        == "waits for an answer over the network in an exception handler (except OSError as e)"
    )
    assert activity.advice.startswith("Look at the exception first")


def make_hang(
    main: ThreadStack, *others: ThreadStack, lifecycle: Lifecycle = Lifecycle.INITIALISED
) -> ScriptedJob:
    """A hang in which rank 0 waits for rank 1, whose threads have the given stacks."""
    job = ScriptedJob(2)
    job.make_calls()
    job.ranks[1].lifecycle = lifecycle
    job.send_heartbeats()
    job.make_call(0)
    job.advance_time(11)
    job.send_heartbeats()
    job.apply_heartbeat(
        samples=(
            heartbeat.StackReply(key="1-1", request="r", source="py-spy", threads=(main, *others)),
        )
    )
    return job


def get_advice(job: ScriptedJob) -> str:
    (verdict,) = job.list_due_verdicts()
    assert verdict.kind is VerdictKind.MISSING_RANK or verdict.kind is VerdictKind.EXITED_RANK
    return verdict.advice


WAITS_FOR_BATCH = make_stack(
    ("_MultiProcessingDataLoaderIter._try_get_data", f"{TORCH_LIB}/utils/data/dataloader.py")
)


def test_awaited_worker_is_named() -> None:
    frames = (Frame(function="__getitem__", file="/home/me/data.py", line=9, text="with lock:"),)
    idle = ThreadStack(
        thread="DataLoader worker (pid 6)",
        pid=6,
        frames=(Frame(function="get", file=f"{PYTHON_LIB}/queue.py", line=1),),
    )
    busy = ThreadStack(thread="DataLoader worker (pid 7)", pid=7, frames=frames)
    own = ThreadStack(thread="loader", frames=frames)
    advice = get_advice(make_hang(WAITS_FOR_BATCH, own, idle, busy))
    expected = (
        "It waits for a batch of its DataLoader: its DataLoader worker (pid 7) is at data.py:9 in"
        " __getitem__, where it waits for a lock. "
    )
    assert advice.startswith(expected)


def test_child_without_stack_is_named() -> None:
    child = ThreadStack(
        thread="child process sleep (pid 7)",
        pid=7,
        frames=(),
        error="sleep is not a Python process",
    )
    assert "It waits for a child process to end: its child process sleep (pid 7). " in get_advice(
        make_hang(make_stack(("run", f"{PYTHON_LIB}/subprocess.py")), child)
    )


def test_awaited_thread_is_named_but_not_the_recorder_thread() -> None:
    frames = (Frame(function="upload", file="/home/me/io.py", line=4, text="time.sleep(9)"),)
    ours, theirs = (
        ThreadStack(thread="hangwatch", frames=frames),
        ThreadStack(thread="uploader", frames=frames),
    )
    shutdown = ThreadStack(
        thread="MainThread",
        main=True,
        frames=(Frame(function="_shutdown", file=f"{PYTHON_LIB}/threading.py", line=1),),
    )
    expected = (
        "It waits for a thread to end at interpreter exit: its thread uploader is at io.py:4 in"
        " upload, where it sleeps."
    )
    assert get_advice(make_hang(shutdown, ours, theirs)).startswith(expected)


@pytest.mark.parametrize(
    ("holds", "text", "does"),
    [
        (True, "data = sensor.recv(4)", "waits for an answer over the network"),
        (True, "driver.sleep(600)", "holds the GIL"),
        (False, "driver.sleep(600)", ""),
    ],
)
def test_gil_holder_of_frozen_rank_is_named(holds: bool, text: str, does: str) -> None:
    driver = Frame(function="read", file="/home/me/sensor.py", line=7, text=text)
    thief = ThreadStack(thread="sensor", frames=(driver,), holds_gil=True)
    main = make_stack(text="time.sleep(0.03)")
    job = ScriptedJob(2)
    job.make_calls()
    job.ranks[1].pulse_at = job.now
    job.send_heartbeats()
    job.make_call(0)
    job.advance_time(14)
    job.send_heartbeats()
    others = (thief,) if holds else (replace(thief, holds_gil=False),)
    job.apply_heartbeat(
        samples=(
            heartbeat.StackReply(key="1-1", request="r", source="py-spy", threads=(main, *others)),
        )
    )
    (verdict,) = job.list_due_verdicts()
    assert verdict.kind is VerdictKind.FROZEN_RANK
    assert verdict.site is not None
    if holds:
        assert verdict.summary.endswith(": its thread sensor is at sensor.py:7 in read")
        assert verdict.advice.startswith(f"Its thread sensor {does}. ")
        assert (verdict.site.file, verdict.site.line) == ("/home/me/sensor.py", 7)
    else:
        assert verdict.summary.endswith(": it is at train.py:3 in main")
        assert verdict.advice.startswith("No Python code can run there"), (
            "it waits for the GIL on the line of a sleep"
        )


def test_missing_stack_of_frozen_rank_is_mentioned() -> None:
    job = ScriptedJob(2)
    job.make_calls()
    job.ranks[1].pulse_at = job.now
    job.send_heartbeats()
    job.make_call(0)
    job.advance_time(14)
    job.send_heartbeats()
    refused = heartbeat.StackReply(key="1-1", request="r", source="py-spy", error="not permitted")
    job.apply_heartbeat(samples=(refused,))
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.FROZEN_RANK, (1,))
    assert verdict.advice.startswith(
        "No Python code can run there, and no stack is known: look for a native call after"
    )
    assert verdict.site is None


def test_gil_holder_of_running_rank_is_ignored() -> None:
    frames = (Frame(function="upload", file="/home/me/io.py", line=4),)
    advice = get_advice(
        make_hang(
            make_stack(text="with lock:"),
            ThreadStack(thread="uploader", frames=frames, holds_gil=True),
        )
    )
    assert advice.startswith("It waits for a lock: its thread uploader is at io.py:4")


def test_advice_during_interpreter_exit() -> None:
    advice = get_advice(make_hang(make_stack(text="time.sleep(9)"), lifecycle=Lifecycle.EXITING))
    assert advice.startswith("It sleeps at interpreter exit.")


def test_sleep_in_declared_phase_gives_no_advice() -> None:
    job = make_hang(make_stack(text="time.sleep(9)"))
    assert get_advice(job).startswith("It sleeps. If it polls")
    job.ranks[1].phase = "export"
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.SLOW_RANK, (1,))
    assert verdict.advice.startswith("Its script declared this phase")


def test_early_group_destruction_is_advised() -> None:
    advice = get_advice(make_hang(make_stack(text="x = 1"), lifecycle=Lifecycle.DESTROYED))
    assert advice.startswith(
        "It called destroy_process_group while others still communicated. The others made one more"
        " call"
    )


def test_uninformative_stack_keeps_advice() -> None:
    assert (
        get_advice(make_hang(make_stack(text="x = f(x)")))
        == "Its stack shows what it does instead of joining the others."
    )


# Whom it waits for works, or does not.

POOL_WORKER = (
    Frame(function="tokenize", file="/home/me/text.py", line=8),
    Frame(function="worker", file=f"{PYTHON_LIB}/multiprocessing/pool.py", line=1),
    Frame(
        function="BaseProcess._bootstrap", file=f"{PYTHON_LIB}/multiprocessing/process.py", line=1
    ),
)
POOL_THREAD = (
    Frame(function="pack", file="/home/me/io.py", line=4),
    Frame(function="_worker", file=f"{PYTHON_LIB}/concurrent/futures/thread.py", line=1),
)
IMPORT_FRAMES = (
    Frame(function="<module>", file="/home/me/train.py", line=8),
    Frame(function="prepare", file=f"{PYTHON_LIB}/multiprocessing/spawn.py", line=1),
    Frame(function="spawn_main", file=f"{PYTHON_LIB}/multiprocessing/spawn.py", line=1),
)
LAUNCH_FRAMES = (
    *IMPORT_FRAMES[:1],
    Frame(function="_wrap", file="/site-packages/torch/multiprocessing/spawn.py", line=1),
)
SPINNING_FRAMES = (Frame(function="monitor", file="/home/me/monitor.py", line=2),)
WAITS_FOR_POOL = make_stack(
    ("wait", f"{PYTHON_LIB}/threading.py"),
    ("MapResult.get", f"{PYTHON_LIB}/multiprocessing/pool.py"),
)
WAITS_FOR_FUTURE = make_stack(
    ("wait", f"{PYTHON_LIB}/threading.py"),
    ("Future.result", f"{PYTHON_LIB}/concurrent/futures/_base.py"),
)
WAITS_FOR_BATCH = make_stack(
    ("select", f"{PYTHON_LIB}/selectors.py"),
    ("_Iter.__next__", "/site-packages/torch/utils/data/dataloader.py"),
)
WAITS_FOR_CHILD = make_stack(
    ("Popen._try_wait", f"{PYTHON_LIB}/subprocess.py"), ("run", f"{PYTHON_LIB}/subprocess.py")
)
WAITS_FOR_FORKED = make_stack(("Popen.wait", f"{PYTHON_LIB}/multiprocessing/popen_fork.py"))
JOINS_THREAD = make_stack(
    ("_wait_for_tstate_lock", f"{PYTHON_LIB}/threading.py"),
    ("Thread.join", f"{PYTHON_LIB}/threading.py"),
)


def sample_child(pid: int, *used: float, frames: tuple[Frame, ...] = ()) -> list[ThreadStack]:
    """Consecutive samples of a child process, one per given CPU time."""
    return [
        ThreadStack(thread=f"child process c (pid {pid})", pid=pid, frames=frames, cpu_s=cpu)
        for cpu in used
    ]


def starve_threads(stacks: list[ThreadStack], *ready: float) -> list[ThreadStack]:
    """The same, with how long it was ready to run and had no CPU."""
    return [replace(one, ready_s=ready_s) for one, ready_s in zip(stacks, ready, strict=True)]


def sample_thread(
    tid: int, *used: float, frames: tuple[Frame, ...] = SPINNING_FRAMES, name: str = ""
) -> list[ThreadStack]:
    return [
        ThreadStack(thread=name or f"Thread-{tid}", tid=tid, frames=frames, cpu_s=cpu)
        for cpu in used
    ]


def make_sampled_hang(main: ThreadStack, *others: list[ThreadStack]) -> ScriptedJob:
    """The hang of `make_hang`, with one sample per second."""
    job = make_hang(main, *(other[0] for other in others))
    for n in range(1, max(map(len, others))):
        job.advance_time(1)
        job.send_heartbeats()
        now = tuple(other[n] for other in others)
        job.apply_heartbeat(
            samples=(
                heartbeat.StackReply(key="1-1", request="r", source="py-spy", threads=(main, *now)),
            )
        )
    return job


@pytest.mark.parametrize(
    ("main", "others", "slow"),
    [
        (WAITS_FOR_POOL, [sample_child(7, 3.0, 3.9, frames=POOL_WORKER)], True),
        (WAITS_FOR_POOL, [sample_child(7, 3.0, 3.01, frames=POOL_WORKER)], False),
        (
            WAITS_FOR_POOL,
            [
                sample_child(8, 3.0, 3.0, frames=POOL_WORKER),
                sample_child(7, 3.0, 3.9, frames=POOL_WORKER),
            ],
            True,
        ),
        (
            WAITS_FOR_POOL,
            [
                sample_child(7, 3.0, 3.0, frames=POOL_WORKER),
                sample_child(6, 3.0, 3.9),
                sample_thread(5, 0.0, 1.0),
            ],
            False,
        ),
        (WAITS_FOR_FUTURE, [sample_thread(5, 0.0, 0.9, frames=POOL_THREAD)], True),
        (
            WAITS_FOR_FUTURE,
            [sample_thread(5, 0.0, 0.0, frames=POOL_THREAD), sample_thread(6, 0.0, 1.0)],
            False,
        ),
        (WAITS_FOR_POOL, [sample_child(7, 3.0, 3.9, frames=IMPORT_FRAMES)], True),
        (WAITS_FOR_POOL, [sample_child(7, 3.0, 3.9, frames=LAUNCH_FRAMES)], False),
        (WAITS_FOR_BATCH, [sample_child(7, 3.0, 3.9, frames=IMPORT_FRAMES)], True),
        (WAITS_FOR_FORKED, [sample_child(7, 3.0, 3.9, frames=IMPORT_FRAMES)], True),
        (WAITS_FOR_FORKED, [sample_child(7, 3.0, 3.0, frames=IMPORT_FRAMES)], False),
        (WAITS_FOR_CHILD, [starve_threads(sample_child(7, 0.5, 0.51), 7.0, 7.9)], True),
        (WAITS_FOR_CHILD, [starve_threads(sample_child(7, 0.5, 0.51), 7.0, 7.2)], False),
        (
            JOINS_THREAD,
            [starve_threads(sample_thread(5, 0.0, 0.0), 0.0, 0.9), sample_thread(6, 0.0, 1.0)],
            True,
        ),
        (WAITS_FOR_CHILD, [sample_child(7, 0.5, 1.4)], True),
        (
            WAITS_FOR_CHILD,
            [sample_child(8, 0.0, 0.0), sample_child(7, 0.5, 1.4), sample_thread(5, 0.0, 1.0)],
            False,
        ),
        (
            WAITS_FOR_FORKED,
            [sample_child(8, 0.5, 1.4), sample_child(7, 0.5, 0.5, frames=POOL_WORKER)],
            False,
        ),
        (
            WAITS_FOR_FORKED,
            [sample_child(8, 0.5, 0.5), sample_child(7, 0.5, 1.4, frames=POOL_WORKER)],
            True,
        ),
        (JOINS_THREAD, [sample_thread(5, 0.0, 1.0)], True),
        (JOINS_THREAD, [sample_thread(5, 0.0, 1.0), sample_thread(6, 0.0, 0.0)], False),
        (
            JOINS_THREAD,
            [sample_thread(5, 0.0, 0.0), sample_thread(6, 0.0, 1.0, name="hangwatch")],
            False,
        ),
        (
            make_stack(("Event.wait", f"{PYTHON_LIB}/threading.py")),
            [sample_thread(5, 0.0, 1.0)],
            True,
        ),
        (
            make_stack(("Event.wait", f"{PYTHON_LIB}/threading.py")),
            [sample_thread(5, 0.0, 1.0), sample_thread(6, 0.0, 0.0)],
            False,
        ),
        (
            make_stack(
                ("wait", f"{PYTHON_LIB}/threading.py"), ("Queue.get", f"{PYTHON_LIB}/queue.py")
            ),
            [sample_thread(5, 0.0, 1.0)],
            True,
        ),
        (
            make_stack(
                ("wait", f"{PYTHON_LIB}/threading.py"), ("Queue.get", f"{PYTHON_LIB}/queue.py")
            ),
            [sample_thread(5, 0.0, 0.01)],
            False,
        ),
        (make_stack(text="with lock:"), [sample_thread(5, 0.0, 1.0)], True),
        (
            make_stack(text="x = f(x)"),
            [sample_thread(5, 0.0, 1.0), sample_child(7, 0.0, 1.0)],
            False,
        ),
    ],
)
def test_awaited_process_is_working(
    main: ThreadStack, others: list[list[ThreadStack]], slow: bool
) -> None:
    (verdict,) = make_sampled_hang(main, *others).list_due_verdicts()
    assert (verdict.kind is VerdictKind.SLOW_RANK) is slow
    assert (verdict.severity is Severity.WARNING) is slow


def test_sequence_of_short_programs_is_not_stuck() -> None:
    job = make_sampled_hang(WAITS_FOR_CHILD, sample_child(7, 0.0, 0.0))
    assert [v.kind for v in job.list_due_verdicts()] == [VerdictKind.MISSING_RANK]
    job = make_hang(WAITS_FOR_CHILD, *sample_child(7, 0.0))
    job.advance_time(1)
    job.send_heartbeats()
    job.apply_heartbeat(
        samples=(
            heartbeat.StackReply(
                key="1-1",
                request="r",
                source="py-spy",
                threads=(WAITS_FOR_CHILD, *sample_child(8, 0.0)),
            ),
        )
    )
    assert [v.kind for v in job.list_due_verdicts()] == [VerdictKind.SLOW_RANK]


def test_working_pool_worker_and_waiting_rank_are_both_reported() -> None:
    idle, busy = (
        sample_child(7, 3.0, 3.0, frames=POOL_WORKER),
        sample_child(6, 3.0, 3.9, frames=POOL_WORKER),
    )
    (verdict,) = make_sampled_hang(
        WAITS_FOR_POOL, sample_thread(5, 0.0, 1.0), idle, busy
    ).list_due_verdicts()
    assert (
        verdict.advice
        == "It waits for the result of a pool: its child process c (pid 6) is at text.py:8 in"
        " tokenize. That makes progress: slow rather than stuck. hangwatch.phase() declares work that may"
        " take long."
    )


def test_advice_to_declare_long_work_is_given_once() -> None:
    saves = make_stack(
        ("_save", f"{TORCH_LIB}/serialization.py"), ("save", f"{TORCH_LIB}/serialization.py")
    )
    job = make_hang(saves)
    (verdict,) = make_sampled_hang(saves, sample_thread(5, 0.0, 0.0)).list_due_verdicts()
    assert (
        verdict.advice
        == "It writes a checkpoint. Look at the storage that it writes to. hangwatch.phase()"
        " declares work that may take long."
    )
    job.advance_time(1)
    job.send_heartbeats()
    job.apply_heartbeat(
        samples=(
            heartbeat.StackReply(
                key="1-1",
                request="r",
                source="py-spy",
                threads=(make_stack(("f", f"{TORCH_LIB}/nn.py")),),
            ),
        )
    )
    job.advance_time(1)
    job.send_heartbeats()
    job.apply_heartbeat(
        samples=(heartbeat.StackReply(key="1-1", request="r", source="py-spy", threads=(saves,)),)
    )
    (verdict,) = job.list_due_verdicts()
    assert (
        verdict.advice
        == "It writes a checkpoint. Look at the storage that it writes to. Its stack changes: slow"
        " rather than stuck. hangwatch.phase() declares work that may take long."
    )


def test_rank_working_at_first_is_sampled_again_and_found_stuck() -> None:
    job = make_sampled_hang(WAITS_FOR_CHILD, sample_child(7, 0.5, 1.4))
    assert not any(request.stacks and request.rank == 1 for request in job.run_diagnosis().requests)
    job.advance_time(11)
    job.send_heartbeats()
    assert any(request.stacks and request.rank == 1 for request in job.run_diagnosis().requests)
    job.apply_heartbeat(
        samples=(
            heartbeat.StackReply(
                key="1-1",
                request="r",
                source="py-spy",
                threads=(WAITS_FOR_CHILD, *sample_child(7, 1.5)),
            ),
        )
    )
    (verdict,) = job.list_due_verdicts()
    assert verdict.kind is VerdictKind.MISSING_RANK
    assert "Look at what that process does" in verdict.advice


def test_second_sample_is_awaited_for_a_limited_time() -> None:
    job = make_hang(WAITS_FOR_CHILD, *sample_child(7, 0.5))
    (verdict,) = job.run_diagnosis().verdicts
    assert (verdict.kind, verdict.is_confirmed) == (VerdictKind.MISSING_RANK, False)
    job.advance_time(2)
    job.send_heartbeats()
    assert [v.kind for v in job.list_due_verdicts()] == [VerdictKind.MISSING_RANK]


# On the node.


def test_handler_around_line(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""\
            try:
                work()
            except (ValueError, OSError) as error:
                if error:
                    try:
                        report(error)
                    except Exception:
                        pass
            after()
            """)
    )

    def find_handler_at(line: int) -> str | None:
        (stack,) = sampler.add_source_text(
            [ThreadStack(thread="t", frames=(Frame(function="f", file=str(program), line=line),))],
            1,
        )
        return stack.frames[0].handler

    assert [find_handler_at(line) for line in (2, 4, 6, 8, 9)] == [
        None, "except (ValueError, OSError) as error", "except (ValueError, OSError) as error", "except Exception", None,
    ]  # fmt: skip
    program.write_text("except :\n this is no Python\n")
    assert find_handler_at(2) is None


def test_polling_loop_around_line(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""\
            while not all(w.is_completed() for w in works):
                time.sleep(0.1)
            while not stop:
                if work.is_completed():
                    stop = True
            """)
    )

    def find_polling_at(line: int) -> str | None:
        (stack,) = sampler.add_source_text(
            [ThreadStack(thread="t", frames=(Frame(function="f", file=str(program), line=line),))],
            1,
        )
        return stack.frames[0].polls

    whole = "while not all(w.is_completed() for w in works)"
    assert [find_polling_at(line) for line in (1, 2, 3, 4, 5)] == [whole, whole, None, None, None]


def collect_child_stacks(threads: list[ThreadStack], pid: int, pyspy: PySpy) -> ThreadStacks:
    return sampler.collect_child_stacks(threads, pid, pyspy, TransferMeter(pyspy.proc), {})


def test_awaited_children_are_sampled(tmp_path: Path) -> None:
    """A process with two children, one Python and one not, as a rank that waits for them and as one
    that waits for a lock.
    """
    program = tmp_path / "parent.py"
    program.write_text(
        "import subprocess, sys\n"
        "pipes = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE}\n"
        "asks = subprocess.Popen([sys.executable, '-c', 'input(\"up\\\\n\")'], **pipes)\n"
        "children = [subprocess.Popen(['sleep', '60']), asks]\n"
        "asks.stdout.readline()\n"
        "print('ready', flush=True)\n"
        "input()\n"
        "[c.kill() for c in children]\n"
        "[c.wait() for c in children]\n"
    )
    if (path := locate_pyspy()) is None:
        pytest.skip("py-spy is not installed")
    with subprocess.Popen(
        [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None and parent.stdin is not None
        assert parent.stdout.readline() == "ready\n"
        pyspy = PySpy(path=path)
        waits = make_stack(("run", f"{PYTHON_LIB}/subprocess.py"))
        try:
            stacks_by_thread = {
                child.thread.rpartition(" (pid")[0]: child
                for child in collect_child_stacks([waits], parent.pid, pyspy)
            }
            no_stacks = collect_child_stacks([make_stack(text="with lock:")], parent.pid, pyspy)
        finally:
            parent.communicate("\n")
    assert no_stacks == ()
    assert next(iter(stacks_by_thread)) == "child process sleep", "the newest comes first"
    assert all(child.cpu_s is not None for child in stacks_by_thread.values())
    sleeping = stacks_by_thread.pop("child process sleep")
    assert (sleeping.frames, sleeping.main) == ((), False)
    assert "is not a Python process" in (sleeping.error or "")
    (python,) = stacks_by_thread.values()
    assert python.pid is not None
    assert python.main is False
    assert python.error is not None or [f.function for f in python.frames] == ["<module>"]


def test_importing_fork_server_counts_as_child(tmp_path: Path) -> None:
    add_process(tmp_path, 1, children=(2,))
    add_process(tmp_path, 2, parent=1)
    (tmp_path / "2" / "cmdline").write_bytes(
        b"python\0-c\0from multiprocessing.forkserver import main; main()\0"
    )
    pyspy = PySpy(path=None, proc=str(tmp_path))
    assert [child.pid for child in collect_child_stacks([WAITS_FOR_FORKED], 1, pyspy)] == [2]
    (tmp_path / "2" / "task" / "2" / "children").write_text("3")
    add_process(tmp_path, 3, parent=2)
    assert [child.pid for child in collect_child_stacks([WAITS_FOR_FORKED], 1, pyspy)] == [3]


def test_own_children_first_then_running_ones(
    tmp_path: Path,
) -> None:
    add_process(tmp_path, 1, children=(2, *range(10, 20)), start=1)
    add_process(tmp_path, 2, parent=1, children=(3,), start=2)
    add_process(tmp_path, 3, parent=2, start=300, ticks=500)
    for pid in range(10, 20):
        add_process(tmp_path, pid, parent=1, start=pid, state="R" if pid == 10 else "S")
    children_stacks = collect_child_stacks(
        [WAITS_FOR_CHILD], 1, PySpy(path=None, proc=str(tmp_path))
    )
    assert [child.pid for child in children_stacks] == [10, *range(19, 12, -1)]
    (tmp_path / "1" / "task" / "1" / "children").write_text("2")
    own, theirs = collect_child_stacks([WAITS_FOR_CHILD], 1, PySpy(path=None, proc=str(tmp_path)))
    assert (own.pid, theirs.pid, theirs.cpu_s) == (2, 3, None)
    assert own.cpu_s is not None
    assert own.cpu_s >= 500 / TICKS_PER_S


def test_forked_child_stack_ends_at_fork() -> None:
    born = Frame(
        function="BaseProcess._bootstrap", file=f"{PYTHON_LIB}/multiprocessing/process.py", line=1
    )
    assert sampler._drop_parent_frames(
        (USER_FRAME, born, Frame(function="Popen.__init__", file="x", line=1), USER_FRAME)
    ) == (USER_FRAME, born)
    assert sampler._drop_parent_frames((USER_FRAME,)) == (USER_FRAME,)


@pytest.mark.parametrize("is_usual", [False, True])
def test_exception_that_the_culprit_is_handling(is_usual: bool) -> None:
    """A barrier in a finally clause keeps it from being seen. Ranks that all handle one, as where a
    program runs in an except clause, do not differ in it.
    """
    job = ScriptedJob(3)
    job.make_calls()
    for rank in range(3):
        job.make_call(rank, "barrier" if rank == 1 else "all_reduce")
    job.advance_time(1.1)
    job.send_heartbeats()
    site = Site(file="train.py", line=12, function="read_batch")
    for rank in range(3) if is_usual else (1,):
        job.latest_attempt.processes[rank].handling = ExceptionInfo(
            type="ValueError", message="7 columns", site=site
        )
    (verdict,) = job.run_diagnosis().verdicts
    text = "Rank 1 is handling ValueError: 7 columns, raised at train.py:12 in read_batch: it is in"
    assert verdict.culprits == (1,) and verdict.advice.startswith(text) != is_usual


CALLS_WORKER = make_stack(
    ("rpc_sync", f"{TORCH_LIB}/distributed/rpc/api.py"),
    ("wrapper", f"{TORCH_LIB}/distributed/rpc/api.py"),
)
WAITS_FOR_EVENT = (
    Frame(function="Event.wait", file=f"{PYTHON_LIB}/threading.py", line=1),
    Frame(function="answer", file="/home/me/train.py", line=13),
    Frame(function="_run_function", file=f"{TORCH_LIB}/distributed/rpc/internal.py", line=203),
)


def sample_called_rank(job: ScriptedJob, rank: int, cpu_s: float, *frames: Frame) -> None:
    threads = (make_stack(), ThreadStack(thread="Dummy-1", tid=9, frames=frames, cpu_s=cpu_s))
    sample = heartbeat.StackReply(key=f"{rank}-1", request="r", source="py-spy", threads=threads)
    job.apply_heartbeat(samples=(sample,))


def make_remote_hang(*, cpu_share: float, frames: tuple[Frame, ...]) -> ScriptedJob:
    """Rank 1 waits for a remote call, and ranks 0 and 2 for rank 1 in a collective. A thread of rank 2 has
    these frames.
    """
    job = ScriptedJob(3)
    job.make_calls()
    job.send_heartbeats()
    job.make_calls(except_ranks=(1,), done=False)
    for second in range(11):
        job.advance_time(1.0)
        job.send_heartbeats()
        for request in job.run_diagnosis().requests:
            if request.stacks and request.rank == 1:
                job.report_stack(1, *CALLS_WORKER.frames)
            elif request.stacks:
                used_s = cpu_share * second if request.rank == 2 else 0.0
                sample_called_rank(
                    job, request.rank, used_s, *(frames if request.rank == 2 else ())
                )
    return job


def test_thread_that_executes_remote_call_is_named() -> None:
    job = make_remote_hang(cpu_share=0.0, frames=WAITS_FOR_EVENT)
    (verdict,) = job.list_due_verdicts()
    assert verdict.kind is VerdictKind.MISSING_RANK
    assert verdict.culprits == (1,)
    assert verdict.advice.startswith("It waits for the reply of another rank.")
    assert verdict.advice.endswith(
        "Rank 2 executes a remote call, which may be this one: its thread Dummy-1 is at train.py:13 in answer,"
        " where it waits for another thread."
    )
    assert not any(request.stacks for request in job.run_diagnosis().requests)


def test_rank_whose_remote_call_may_be_at_work_is_slow() -> None:
    job = make_remote_hang(cpu_share=0.9, frames=WAITS_FOR_EVENT[1:])
    (verdict,) = job.list_due_verdicts()
    assert verdict.kind is VerdictKind.SLOW_RANK
    assert verdict.culprits == (1,)
    assert "It waits for a remote call, and rank 2 works on one." in verdict.advice


@pytest.mark.parametrize(
    "frames",
    [
        WAITS_FOR_EVENT[:2],  # the thread was started by its own rank
        (WAITS_FOR_EVENT[2],),  # no code of the user runs yet, or any more
        (WAITS_FOR_EVENT[2], WAITS_FOR_EVENT[1]),  # the thread handles a call of its own
    ],
)
def test_other_threads_execute_no_remote_call(frames: tuple[Frame, ...]) -> None:
    job = make_remote_hang(cpu_share=0.9, frames=frames)
    (verdict,) = job.list_due_verdicts()
    assert verdict.kind is VerdictKind.MISSING_RANK
    assert "executes a remote call" not in verdict.advice


def test_ranks_are_not_sampled_for_remote_calls_where_none_is_awaited() -> None:
    job = ScriptedJob(8)
    job.make_calls()
    job.send_heartbeats()
    job.make_calls(except_ranks=(1,), done=False)
    job.advance_time(6)
    job.send_heartbeats()
    job.report_stack(1, *WAITS_FOR_EVENT[:2])
    requested = {request.rank for request in job.run_diagnosis().requests if request.stacks}
    assert requested == {0, 1, 2, 3, 4}
