"""What a stack says that a thread is doing, and how a verdict's advice tells it; the workers that a
rank waits for.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from hangwatch.agent.node.stacks import children, source
from hangwatch.agent.node.stacks.pyspy import PySpy, locate
from hangwatch.agent.node.system.processes import TICKS
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.ranks import Lifecycle
from hangwatch.model.threads import Frame, ThreadStack
from hangwatch.protocol import heartbeat
from hangwatch.stacks.activities import classify_activity
from tests.unit.agent.node.test_processes import add
from tests.unit.jobs import Job

PYTHON = "/usr/lib/python3.11"
TORCH = f"{PYTHON}/site-packages/torch"
USER = Frame(function="main", file="/home/me/train.py", line=3)


def stack(
    *frames: tuple[str, str], text: str | None = None, user: Frame = USER, active: bool = False
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
        ([("Condition.wait", f"{PYTHON}/threading.py"), ("Queue.get", f"{PYTHON}/queue.py")], "waits for an item of a queue"),
        ([("Event.wait", f"{PYTHON}/threading.py")], "waits for another thread"),
        ([("_wait_for_tstate_lock", f"{PYTHON}/threading.py"), ("Thread.join", f"{PYTHON}/threading.py")], "waits for a thread to end"),
        ([("Popen._try_wait", f"{PYTHON}/subprocess.py"), ("run", f"{PYTHON}/subprocess.py")], "waits for a child process to end"),
        ([("read_signed", f"{PYTHON}/multiprocessing/forkserver.py")], "waits for another process"),
        ([("Popen.poll", f"{PYTHON}/multiprocessing/popen_fork.py")], "waits for a child process to end"),
        ([("wait", f"{PYTHON}/threading.py"), ("Future.result", f"{PYTHON}/concurrent/futures/_base.py")],
         "waits for the result of a pool"),
        ([("SocketIO.readinto", f"{PYTHON}/socket.py"), ("urlopen", f"{PYTHON}/urllib/request.py")],
         "waits for an answer over the network"),
        (
            [
                ("_PollLikeSelector.select", f"{PYTHON}/selectors.py"),
                ("Queue.get", f"{PYTHON}/multiprocessing/queues.py"),
                ("_MultiProcessingDataLoaderIter._try_get_data", f"{TORCH}/utils/data/dataloader.py"),
                ("_BaseDataLoaderIter.__next__", f"{TORCH}/utils/data/dataloader.py"),
            ],
            "waits for a batch of its DataLoader",
        ),
        ([("FileBaton.wait", f"{TORCH}/utils/file_baton.py"), ("load", f"{TORCH}/utils/cpp_extension.py")],
         "waits for a lock file while it builds an extension"),
        ([("_save", f"{TORCH}/serialization.py"), ("save", f"{TORCH}/serialization.py")], "writes a checkpoint"),
        ([("_load", f"{TORCH}/serialization.py")], "reads a checkpoint"),
        ([("Event.wait", f"{PYTHON}/threading.py"), ("_compile", f"{TORCH}/_dynamo/convert_frame.py")],
         "waits for another thread while it compiles"),
        ([("compile_wrapper", f"{TORCH}/_dynamo/eval_frame.py")], ""),
        ([("destroy_process_group", f"{TORCH}/distributed/distributed_c10d.py")], "is in destroy_process_group"),
        ([("StreamHandler.emit", f"{PYTHON}/logging/__init__.py")], "logs"),
        ([("rpc_sync", f"{TORCH}/distributed/rpc/api.py"), ("wrapper", f"{TORCH}/distributed/rpc/api.py")],
         "waits for the reply of another rank"),
        ([("Pdb.cmdloop", f"{PYTHON}/pdb.py")], "waits for somebody's input"),
        ([("all_reduce", f"{TORCH}/distributed/distributed_c10d.py")], ""),
        ([("get", "/home/me/queue.py")], ""),
    ],
)  # fmt: skip
def test_library_frames(frames: list[tuple[str, str]], says: str) -> None:
    assert str(classify_activity(stack(*frames))) == says


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("with self.lock:", "waits for a lock"),
        ("mutex.acquire()", "waits for a lock"),
        ("with open(lock_path) as file:", "waits for a file"),
        ("fcntl.flock(file, fcntl.LOCK_EX)", "waits for a lock file"),
        ("data = connection.recv(64)", "waits for an answer over the network"),
        ("store.wait(['ready'])", "waits for a key of a store"),
        ("time.sleep(5)", "sleeps"),
        ("embedding = reference.to_here()", "waits for the reply of another rank"),
        ("work.wait()", "waits for a Future or a Work of torch's"),
        ("answer = input('go on? ')", "waits for somebody's input"),
        ("print(loss)", "waits to print"),
        ("x = f(x)", ""),
    ],
)
def test_lines_that_wait_in_c_code(line: str, says: str) -> None:
    assert str(classify_activity(stack(text=line))) == says


def test_a_line_that_runs_is_not_taken_for_one_that_waits() -> None:
    assert not classify_activity(stack(text="print(loss)", active=True))


def test_frames_behind_the_user_s_tell_the_place_but_not_the_wait() -> None:
    user = Frame(function="__getitem__", file="/home/me/data.py", line=9, text="time.sleep(9)")
    inner = ThreadStack(
        thread="MainThread",
        main=True,
        frames=(
            user,
            Frame(function="fetch", file=f"{TORCH}/utils/data/_utils/fetch.py", line=1),
            Frame(function="Queue.get", file=f"{PYTHON}/queue.py", line=1),
        ),
    )
    assert str(classify_activity(inner)) == "sleeps in the dataset of its DataLoader"
    assert not classify_activity(None)
    assert not classify_activity(ThreadStack(thread="MainThread", frames=()))


def test_an_exception_handler_is_named() -> None:
    user = Frame(
        function="report",
        file="/home/me/train.py",
        line=9,
        text="connection.recv(1)",
        handler="except OSError as e",
    )
    found = classify_activity(ThreadStack(thread="MainThread", main=True, frames=(user,)))
    assert (
        str(found)
        == "waits for an answer over the network in an exception handler (except OSError as e)"
    )
    assert found.advice.startswith("Look at the exception first")


def hang(
    main: ThreadStack, *others: ThreadStack, lifecycle: Lifecycle = Lifecycle.INITIALISED
) -> Job:
    """Rank 1 stands in the given stacks while rank 0 waits for it."""
    job = Job(2)
    job.everybody()
    job.ranks[1].lifecycle = lifecycle
    job.heartbeat()
    job.call(0)
    job.wait(11)
    job.heartbeat()
    job._beat(
        samples=(
            heartbeat.StackReply(key="1-1", request="r", source="py-spy", threads=(main, *others)),
        )
    )
    return job


def advice(job: Job) -> str:
    (verdict,) = job.verdicts()
    assert verdict.kind is VerdictKind.MISSING_RANK or verdict.kind is VerdictKind.EXITED_RANK
    return verdict.advice


WAITS_FOR_BATCH = stack(
    ("_MultiProcessingDataLoaderIter._try_get_data", f"{TORCH}/utils/data/dataloader.py")
)


def test_the_worker_that_it_waits_for_is_named() -> None:
    frames = (Frame(function="__getitem__", file="/home/me/data.py", line=9, text="with lock:"),)
    idle = ThreadStack(
        thread="DataLoader worker (pid 6)",
        pid=6,
        frames=(Frame(function="get", file=f"{PYTHON}/queue.py", line=1),),
    )
    busy = ThreadStack(thread="DataLoader worker (pid 7)", pid=7, frames=frames)
    own = ThreadStack(thread="loader", frames=frames)
    told = advice(hang(WAITS_FOR_BATCH, own, idle, busy))
    expected = "It waits for a batch of its DataLoader: its DataLoader worker (pid 7) is at data.py:9 in __getitem__, where it waits for a lock. "
    assert told.startswith(expected)


def test_a_child_without_a_stack_is_named_all_the_same() -> None:
    child = ThreadStack(
        thread="child process sleep (pid 7)", pid=7, frames=(), error="sleep is no Python"
    )
    assert "It waits for a child process to end: its child process sleep (pid 7). " in advice(
        hang(stack(("run", f"{PYTHON}/subprocess.py")), child)
    )


def test_the_thread_that_it_waits_for_is_named_and_never_our_own() -> None:
    frames = (Frame(function="upload", file="/home/me/io.py", line=4, text="time.sleep(9)"),)
    ours, theirs = (
        ThreadStack(thread="hangwatch", frames=frames),
        ThreadStack(thread="uploader", frames=frames),
    )
    shutdown = ThreadStack(
        thread="MainThread",
        main=True,
        frames=(Frame(function="_shutdown", file=f"{PYTHON}/threading.py", line=1),),
    )
    expected = "It waits for a thread to end at interpreter exit: its thread uploader is at io.py:4 in upload, where it sleeps."
    assert advice(hang(shutdown, ours, theirs)).startswith(expected)


@pytest.mark.parametrize(
    ("holds", "text", "does"),
    [
        (True, "data = sensor.recv(4)", "waits for an answer over the network"),
        (True, "driver.sleep(600)", "keeps the GIL"),
        (False, "driver.sleep(600)", ""),
    ],
)
def test_the_thread_that_holds_the_gil_of_a_frozen_rank_is_named(
    holds: bool, text: str, does: str
) -> None:
    driver = Frame(function="read", file="/home/me/sensor.py", line=7, text=text)
    thief = ThreadStack(thread="sensor", frames=(driver,), holds_gil=True)
    main = stack(text="time.sleep(0.03)")
    job = Job(2)
    job.everybody()
    job.ranks[1].pulse_at = job.now
    job.heartbeat()
    job.call(0)
    job.wait(14)
    job.heartbeat()
    others = (thief,) if holds else (replace(thief, holds_gil=False),)
    job._beat(
        samples=(
            heartbeat.StackReply(key="1-1", request="r", source="py-spy", threads=(main, *others)),
        )
    )
    (verdict,) = job.verdicts()
    assert verdict.kind is VerdictKind.FROZEN_RANK
    assert verdict.site is not None
    if holds:
        assert verdict.summary.endswith(": its thread sensor is at sensor.py:7 in read")
        assert verdict.advice.startswith(f"Its thread sensor {does}. ")
        assert (verdict.site.file, verdict.site.line) == ("/home/me/sensor.py", 7)
    else:
        assert verdict.summary.endswith(": it is at train.py:3 in main")
        assert verdict.advice.startswith("No Python can run there"), (
            "it waits for the GIL on the line of a sleep"
        )


def test_a_thread_that_holds_the_gil_of_a_rank_that_runs_says_nothing() -> None:
    frames = (Frame(function="upload", file="/home/me/io.py", line=4),)
    told = advice(
        hang(
            stack(text="with lock:"), ThreadStack(thread="uploader", frames=frames, holds_gil=True)
        )
    )
    assert told.startswith("It waits for a lock: its thread uploader is at io.py:4")


def test_what_runs_while_the_interpreter_exits() -> None:
    told = advice(hang(stack(text="time.sleep(9)"), lifecycle=Lifecycle.EXITING))
    assert told.startswith("It sleeps at interpreter exit.")


def test_that_it_sleeps_is_nothing_to_look_at_in_a_phase_that_it_declared() -> None:
    job = hang(stack(text="time.sleep(9)"))
    assert advice(job).startswith("It sleeps. If it polls")
    job.ranks[1].phase = "export"
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.SLOW_RANK, (1,))
    assert verdict.advice.startswith("Its script declared this phase")


def test_a_group_that_was_destroyed_too_early() -> None:
    told = advice(hang(stack(text="x = 1"), lifecycle=Lifecycle.DESTROYED))
    assert told.startswith(
        "It called destroy_process_group while others still communicated. The others made a call more"
    )


def test_a_stack_that_says_nothing_leaves_the_advice_as_it_was() -> None:
    assert (
        advice(hang(stack(text="x = f(x)")))
        == "Its stack shows what it does instead of joining the others."
    )


# Whom it waits for works, or does not.

POOL_WORKER = (
    Frame(function="tokenize", file="/home/me/text.py", line=8),
    Frame(function="worker", file=f"{PYTHON}/multiprocessing/pool.py", line=1),
    Frame(function="BaseProcess._bootstrap", file=f"{PYTHON}/multiprocessing/process.py", line=1),
)
POOL_THREAD = (
    Frame(function="pack", file="/home/me/io.py", line=4),
    Frame(function="_worker", file=f"{PYTHON}/concurrent/futures/thread.py", line=1),
)
IMPORTS = (
    Frame(function="<module>", file="/home/me/train.py", line=8),
    Frame(function="prepare", file=f"{PYTHON}/multiprocessing/spawn.py", line=1),
    Frame(function="spawn_main", file=f"{PYTHON}/multiprocessing/spawn.py", line=1),
)
OF_A_LAUNCH = (
    *IMPORTS[:1],
    Frame(function="_wrap", file="/site-packages/torch/multiprocessing/spawn.py", line=1),
)
SPINS = (Frame(function="monitor", file="/home/me/monitor.py", line=2),)
WAITS_FOR_POOL = stack(
    ("wait", f"{PYTHON}/threading.py"), ("MapResult.get", f"{PYTHON}/multiprocessing/pool.py")
)
WAITS_FOR_FUTURE = stack(
    ("wait", f"{PYTHON}/threading.py"), ("Future.result", f"{PYTHON}/concurrent/futures/_base.py")
)
WAITS_FOR_BATCH = stack(
    ("select", f"{PYTHON}/selectors.py"),
    ("_Iter.__next__", "/site-packages/torch/utils/data/dataloader.py"),
)
WAITS_FOR_CHILD = stack(
    ("Popen._try_wait", f"{PYTHON}/subprocess.py"), ("run", f"{PYTHON}/subprocess.py")
)
WAITS_FOR_FORKED = stack(("Popen.wait", f"{PYTHON}/multiprocessing/popen_fork.py"))
JOINS = stack(
    ("_wait_for_tstate_lock", f"{PYTHON}/threading.py"), ("Thread.join", f"{PYTHON}/threading.py")
)


def child(pid: int, *used: float, frames: tuple[Frame, ...] = ()) -> list[ThreadStack]:
    """A child at one look after the other, by the CPU time that it has used."""
    return [
        ThreadStack(thread=f"child process c (pid {pid})", pid=pid, frames=frames, cpu_s=cpu)
        for cpu in used
    ]


def starved(stacks: list[ThreadStack], *ready: float) -> list[ThreadStack]:
    """The same, with how long it was ready to run and had no CPU."""
    return [replace(one, ready_s=ready_s) for one, ready_s in zip(stacks, ready, strict=True)]


def thread(
    tid: int, *used: float, frames: tuple[Frame, ...] = SPINS, name: str = ""
) -> list[ThreadStack]:
    return [
        ThreadStack(thread=name or f"Thread-{tid}", tid=tid, frames=frames, cpu_s=cpu)
        for cpu in used
    ]


def looked(main: ThreadStack, *others: list[ThreadStack]) -> Job:
    """As `hang`, with a look each second."""
    job = hang(main, *(other[0] for other in others))
    for n in range(1, max(map(len, others))):
        job.wait(1)
        job.heartbeat()
        now = tuple(other[n] for other in others)
        job._beat(
            samples=(
                heartbeat.StackReply(key="1-1", request="r", source="py-spy", threads=(main, *now)),
            )
        )
    return job


@pytest.mark.parametrize(
    ("main", "others", "slow"),
    [
        (WAITS_FOR_POOL, [child(7, 3.0, 3.9, frames=POOL_WORKER)], True),
        (WAITS_FOR_POOL, [child(7, 3.0, 3.01, frames=POOL_WORKER)], False),
        (
            WAITS_FOR_POOL,
            [child(8, 3.0, 3.0, frames=POOL_WORKER), child(7, 3.0, 3.9, frames=POOL_WORKER)],
            True,
        ),
        (
            WAITS_FOR_POOL,
            [child(7, 3.0, 3.0, frames=POOL_WORKER), child(6, 3.0, 3.9), thread(5, 0.0, 1.0)],
            False,
        ),
        (WAITS_FOR_FUTURE, [thread(5, 0.0, 0.9, frames=POOL_THREAD)], True),
        (WAITS_FOR_FUTURE, [thread(5, 0.0, 0.0, frames=POOL_THREAD), thread(6, 0.0, 1.0)], False),
        (WAITS_FOR_POOL, [child(7, 3.0, 3.9, frames=IMPORTS)], True),
        (WAITS_FOR_POOL, [child(7, 3.0, 3.9, frames=OF_A_LAUNCH)], False),
        (WAITS_FOR_BATCH, [child(7, 3.0, 3.9, frames=IMPORTS)], True),
        (WAITS_FOR_FORKED, [child(7, 3.0, 3.9, frames=IMPORTS)], True),
        (WAITS_FOR_FORKED, [child(7, 3.0, 3.0, frames=IMPORTS)], False),
        (WAITS_FOR_CHILD, [starved(child(7, 0.5, 0.51), 7.0, 7.9)], True),
        (WAITS_FOR_CHILD, [starved(child(7, 0.5, 0.51), 7.0, 7.2)], False),
        (JOINS, [starved(thread(5, 0.0, 0.0), 0.0, 0.9), thread(6, 0.0, 1.0)], True),
        (WAITS_FOR_CHILD, [child(7, 0.5, 1.4)], True),
        (WAITS_FOR_CHILD, [child(8, 0.0, 0.0), child(7, 0.5, 1.4), thread(5, 0.0, 1.0)], False),
        (WAITS_FOR_FORKED, [child(8, 0.5, 1.4), child(7, 0.5, 0.5, frames=POOL_WORKER)], False),
        (WAITS_FOR_FORKED, [child(8, 0.5, 0.5), child(7, 0.5, 1.4, frames=POOL_WORKER)], True),
        (JOINS, [thread(5, 0.0, 1.0)], True),
        (JOINS, [thread(5, 0.0, 1.0), thread(6, 0.0, 0.0)], False),
        (JOINS, [thread(5, 0.0, 0.0), thread(6, 0.0, 1.0, name="hangwatch")], False),
        (stack(("Event.wait", f"{PYTHON}/threading.py")), [thread(5, 0.0, 1.0)], True),
        (
            stack(("Event.wait", f"{PYTHON}/threading.py")),
            [thread(5, 0.0, 1.0), thread(6, 0.0, 0.0)],
            False,
        ),
        (
            stack(("wait", f"{PYTHON}/threading.py"), ("Queue.get", f"{PYTHON}/queue.py")),
            [thread(5, 0.0, 1.0)],
            True,
        ),
        (
            stack(("wait", f"{PYTHON}/threading.py"), ("Queue.get", f"{PYTHON}/queue.py")),
            [thread(5, 0.0, 0.01)],
            False,
        ),
        (stack(text="with lock:"), [thread(5, 0.0, 1.0)], True),
        (stack(text="x = f(x)"), [thread(5, 0.0, 1.0), child(7, 0.0, 1.0)], False),
    ],
)
def test_whom_it_waits_for_works(
    main: ThreadStack, others: list[list[ThreadStack]], slow: bool
) -> None:
    (verdict,) = looked(main, *others).verdicts()
    assert (verdict.kind is VerdictKind.SLOW_RANK) is slow
    assert (verdict.severity is Severity.WARNING) is slow


def test_whoever_runs_one_short_program_after_the_other_is_not_stuck_in_any_of_them() -> None:
    job = looked(WAITS_FOR_CHILD, child(7, 0.0, 0.0))
    assert [v.kind for v in job.verdicts()] == [VerdictKind.MISSING_RANK]
    job = hang(WAITS_FOR_CHILD, *child(7, 0.0))
    job.wait(1)
    job.heartbeat()
    job._beat(
        samples=(
            heartbeat.StackReply(
                key="1-1", request="r", source="py-spy", threads=(WAITS_FOR_CHILD, *child(8, 0.0))
            ),
        )
    )
    assert [v.kind for v in job.verdicts()] == [VerdictKind.SLOW_RANK]


def test_where_a_pool_s_worker_works_both_are_told() -> None:
    idle, busy = child(7, 3.0, 3.0, frames=POOL_WORKER), child(6, 3.0, 3.9, frames=POOL_WORKER)
    (verdict,) = looked(WAITS_FOR_POOL, thread(5, 0.0, 1.0), idle, busy).verdicts()
    assert verdict.advice == (
        "It waits for the result of a pool: its child process c (pid 6) is at text.py:8 in tokenize. "
        "That works: slow rather than stuck. hangwatch.phase() declares work that may take long."
    )


def test_that_long_work_is_to_be_declared_is_told_once() -> None:
    saves = stack(("_save", f"{TORCH}/serialization.py"), ("save", f"{TORCH}/serialization.py"))
    job = hang(saves)
    (verdict,) = looked(saves, thread(5, 0.0, 0.0)).verdicts()
    assert verdict.advice == (
        "It writes a checkpoint. Look at the storage that it writes to. hangwatch.phase() declares work that may take long."
    )
    job.wait(1)
    job.heartbeat()
    job._beat(
        samples=(
            heartbeat.StackReply(
                key="1-1", request="r", source="py-spy", threads=(stack(("f", f"{TORCH}/nn.py")),)
            ),
        )
    )
    job.wait(1)
    job.heartbeat()
    job._beat(
        samples=(heartbeat.StackReply(key="1-1", request="r", source="py-spy", threads=(saves,)),)
    )
    (verdict,) = job.verdicts()
    assert verdict.advice == (
        "It writes a checkpoint. Look at the storage that it writes to. Its stack moves: slow rather than stuck. "
        "hangwatch.phase() declares work that may take long."
    )


def test_who_worked_at_first_is_looked_at_again_and_found_stuck() -> None:
    job = looked(WAITS_FOR_CHILD, child(7, 0.5, 1.4))
    assert not any(request.stacks and request.rank == 1 for request in job.diagnose().requests)
    job.wait(11)
    job.heartbeat()
    assert any(request.stacks and request.rank == 1 for request in job.diagnose().requests)
    job._beat(
        samples=(
            heartbeat.StackReply(
                key="1-1", request="r", source="py-spy", threads=(WAITS_FOR_CHILD, *child(7, 1.5))
            ),
        )
    )
    (verdict,) = job.verdicts()
    assert verdict.kind is VerdictKind.MISSING_RANK
    assert "Look at what that process does" in verdict.advice


def test_the_second_look_is_waited_for_but_not_for_long() -> None:
    job = hang(WAITS_FOR_CHILD, *child(7, 0.5))
    (verdict,) = job.diagnose().verdicts
    assert (verdict.kind, verdict.is_confirmed) == (VerdictKind.MISSING_RANK, False)
    job.wait(2)
    job.heartbeat()
    assert [v.kind for v in job.verdicts()] == [VerdictKind.MISSING_RANK]


# On the node.


def test_the_handler_around_a_line(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """\
            try:
                work()
            except (ValueError, OSError) as error:
                if error:
                    try:
                        report(error)
                    except Exception:
                        pass
            after()
            """
        )
    )

    def handler(line: int) -> str | None:
        (told,) = source.with_text(
            [ThreadStack(thread="t", frames=(Frame(function="f", file=str(program), line=line),))],
            1,
        )
        return told.frames[0].handler

    assert [handler(line) for line in (2, 4, 6, 8, 9)] == [
        None, "except (ValueError, OSError) as error", "except (ValueError, OSError) as error", "except Exception", None,
    ]  # fmt: skip
    program.write_text("except :\n this is no Python\n")
    assert handler(2) is None


def test_the_loop_around_a_line_that_goes_on_until_a_work_is_complete(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """\
            while not all(w.is_completed() for w in works):
                time.sleep(0.1)
            while not stop:
                if work.is_completed():
                    stop = True
            """
        )
    )

    def polls(line: int) -> str | None:
        (told,) = source.with_text(
            [ThreadStack(thread="t", frames=(Frame(function="f", file=str(program), line=line),))],
            1,
        )
        return told.frames[0].polls

    whole = "while not all(w.is_completed() for w in works)"
    assert [polls(line) for line in (1, 2, 3, 4, 5)] == [whole, whole, None, None, None]


def test_the_children_that_a_rank_waits_for(tmp_path: Path) -> None:
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
    if (path := locate()) is None:
        pytest.skip("py-spy is not installed")
    with subprocess.Popen(
        [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None and parent.stdin is not None
        assert parent.stdout.readline() == "ready\n"
        pyspy = PySpy(path=path)
        waits = stack(("run", f"{PYTHON}/subprocess.py"))
        try:
            found = {
                child.thread.rpartition(" (pid")[0]: child
                for child in children.awaited([waits], parent.pid, pyspy)
            }
            nobody = children.awaited([stack(text="with lock:")], parent.pid, pyspy)
        finally:
            parent.communicate("\n")
    assert nobody == ()
    assert next(iter(found)) == "child process sleep", "the newest comes first"
    assert all(child.cpu_s is not None for child in found.values())
    sleeping = found.pop("child process sleep")
    assert (sleeping.frames, sleeping.main) == ((), False)
    assert "is no Python" in (sleeping.error or "")
    (python,) = found.values()
    assert python.pid is not None
    assert python.main is False
    assert python.error is not None or [f.function for f in python.frames] == ["<module>"]


def test_a_fork_server_counts_while_it_imports_for_those_to_come(tmp_path: Path) -> None:
    add(tmp_path, 1, children=(2,))
    add(tmp_path, 2, parent=1)
    (tmp_path / "2" / "cmdline").write_bytes(
        b"python\0-c\0from multiprocessing.forkserver import main; main()\0"
    )
    pyspy = PySpy(path=None, proc=str(tmp_path))
    assert [child.pid for child in children.awaited([WAITS_FOR_FORKED], 1, pyspy)] == [2]
    (tmp_path / "2" / "task" / "2" / "children").write_text("3")
    add(tmp_path, 3, parent=2)
    assert [child.pid for child in children.awaited([WAITS_FOR_FORKED], 1, pyspy)] == [3]


def test_the_rank_s_own_children_come_before_theirs_and_of_many_those_that_run(
    tmp_path: Path,
) -> None:
    add(tmp_path, 1, children=(2, *range(10, 20)), start=1)
    add(tmp_path, 2, parent=1, children=(3,), start=2)
    add(tmp_path, 3, parent=2, start=300, ticks=500)
    for pid in range(10, 20):
        add(tmp_path, pid, parent=1, start=pid, state="R" if pid == 10 else "S")
    found = children.awaited([WAITS_FOR_CHILD], 1, PySpy(path=None, proc=str(tmp_path)))
    assert [child.pid for child in found] == [10, *range(19, 12, -1)]
    (tmp_path / "1" / "task" / "1" / "children").write_text("2")
    own, theirs = children.awaited([WAITS_FOR_CHILD], 1, PySpy(path=None, proc=str(tmp_path)))
    assert (own.pid, theirs.pid, theirs.cpu_s) == (2, 3, None)
    assert own.cpu_s is not None
    assert own.cpu_s >= 500 / TICKS


def test_a_forked_child_s_stack_ends_where_it_was_born() -> None:
    born = Frame(
        function="BaseProcess._bootstrap", file=f"{PYTHON}/multiprocessing/process.py", line=1
    )
    assert children._own(
        (USER, born, Frame(function="Popen.__init__", file="x", line=1), USER)
    ) == (USER, born)
    assert children._own((USER,)) == (USER,)
