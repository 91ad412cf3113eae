"""What a stack says that a thread is doing, and how a verdict's advice tells it; the workers that a rank waits for."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from hangwatch import wire
from hangwatch.activity import activity
from hangwatch.agent.node import children, source
from hangwatch.agent.node.pyspy import PySpy, locate
from hangwatch.types import Frame, Kind, Lifecycle, ThreadStack

from .jobs import Job

PYTHON = "/usr/lib/python3.11"
TORCH = f"{PYTHON}/site-packages/torch"
USER = Frame(function="main", file="/home/me/train.py", line=3)


def stack(*frames: tuple[str, str], text: str | None = None, user: Frame = USER, active: bool = False) -> ThreadStack:
    """Library frames as (function, file), innermost first, then the user's; ``text`` is the innermost line's."""
    made = [Frame(function=function, file=file, line=1) for function, file in frames] + [user]
    made[0] = Frame(function=made[0].function, file=made[0].file, line=made[0].line, text=text, handler=made[0].handler)
    return ThreadStack(thread="MainThread", frames=tuple(made), main=True, active=active)


@pytest.mark.parametrize(
    ("frames", "says"),
    [
        ([("Condition.wait", f"{PYTHON}/threading.py"), ("Queue.get", f"{PYTHON}/queue.py")], "waits for an item of a queue"),
        ([("Event.wait", f"{PYTHON}/threading.py")], "waits for another thread"),
        ([("_wait_for_tstate_lock", f"{PYTHON}/threading.py"), ("Thread.join", f"{PYTHON}/threading.py")], "waits for a thread to end"),
        ([("Popen._try_wait", f"{PYTHON}/subprocess.py"), ("run", f"{PYTHON}/subprocess.py")], "waits for a child process to end"),
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
        ([("Pdb.cmdloop", f"{PYTHON}/pdb.py")], "waits for somebody's input"),
        ([("all_reduce", f"{TORCH}/distributed/distributed_c10d.py")], ""),
        ([("get", "/home/me/queue.py")], ""),
    ],
)  # fmt: skip
def test_library_frames(frames: list[tuple[str, str]], says: str) -> None:
    assert str(activity(stack(*frames))) == says


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
        ("answer = input('go on? ')", "waits for somebody's input"),
        ("print(loss)", "waits to print"),
        ("x = f(x)", ""),
    ],
)
def test_lines_that_wait_in_c_code(line: str, says: str) -> None:
    assert str(activity(stack(text=line))) == says


def test_a_line_that_runs_is_not_taken_for_one_that_waits() -> None:
    assert not activity(stack(text="print(loss)", active=True))


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
    assert str(activity(inner)) == "sleeps in the dataset of its DataLoader"
    assert not activity(None)
    assert not activity(ThreadStack(thread="MainThread", frames=()))


def test_an_exception_handler_is_named() -> None:
    user = Frame(function="report", file="/home/me/train.py", line=9, text="connection.recv(1)", handler="except OSError as e")
    found = activity(ThreadStack(thread="MainThread", main=True, frames=(user,)))
    assert str(found) == "waits for an answer over the network in an exception handler (except OSError as e)"
    assert found.advice.startswith("Look at the exception first")


def hang(main: ThreadStack, *others: ThreadStack, lifecycle: Lifecycle = Lifecycle.INITIALISED) -> Job:
    """Rank 1 stands in the given stacks while rank 0 waits for it."""
    job = Job(2)
    job.everybody()
    job.ranks[1].lifecycle = lifecycle
    job.heartbeat()
    job.call(0)
    job.wait(11)
    job.heartbeat()
    job._beat(samples=(wire.Sample(key="1-1", request="r", source="py-spy", threads=(main, *others)),))
    return job


def advice(job: Job) -> str:
    (verdict,) = job.verdicts()
    assert verdict.kind is Kind.MISSING_RANK or verdict.kind is Kind.EXITED_RANK
    return verdict.advice


WAITS_FOR_BATCH = stack(("_MultiProcessingDataLoaderIter._try_get_data", f"{TORCH}/utils/data/dataloader.py"))


def test_the_worker_that_it_waits_for_is_named() -> None:
    frames = (Frame(function="__getitem__", file="/home/me/data.py", line=9, text="with lock:"),)
    idle = ThreadStack(thread="DataLoader worker (pid 6)", pid=6, frames=(Frame(function="get", file=f"{PYTHON}/queue.py", line=1),))
    busy = ThreadStack(thread="DataLoader worker (pid 7)", pid=7, frames=frames)
    own = ThreadStack(thread="loader", frames=frames)
    told = advice(hang(WAITS_FOR_BATCH, own, idle, busy))
    expected = (
        "It waits for a batch of its DataLoader: its DataLoader worker (pid 7) is at data.py:9 in __getitem__, where it waits for a lock. "
    )
    assert told.startswith(expected)


def test_a_child_without_a_stack_is_named_all_the_same() -> None:
    child = ThreadStack(thread="child process sleep (pid 7)", pid=7, frames=(), error="sleep is no Python")
    assert "It waits for a child process to end: its child process sleep (pid 7). " in advice(
        hang(stack(("run", f"{PYTHON}/subprocess.py")), child)
    )


def test_the_thread_that_it_waits_for_is_named_and_never_our_own() -> None:
    frames = (Frame(function="upload", file="/home/me/io.py", line=4, text="time.sleep(9)"),)
    ours, theirs = ThreadStack(thread="hangwatch", frames=frames), ThreadStack(thread="uploader", frames=frames)
    shutdown = ThreadStack(thread="MainThread", main=True, frames=(Frame(function="_shutdown", file=f"{PYTHON}/threading.py", line=1),))
    expected = "It waits for a thread to end at interpreter exit: its thread uploader is at io.py:4 in upload, where it sleeps."
    assert advice(hang(shutdown, ours, theirs)).startswith(expected)


@pytest.mark.parametrize("holds", [True, False])
def test_the_thread_that_holds_the_gil_of_a_frozen_rank_is_named(holds: bool) -> None:
    driver = Frame(function="read", file="/home/me/sensor.py", line=7, text="data = sensor.recv(4)")
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
    job._beat(samples=(wire.Sample(key="1-1", request="r", source="py-spy", threads=(main, *others)),))
    (verdict,) = job.verdicts()
    assert verdict.kind is Kind.FROZEN_RANK
    assert verdict.site is not None
    if holds:
        assert verdict.summary.endswith(": its thread sensor is at sensor.py:7 in read")
        assert verdict.advice.startswith("Its thread sensor waits for an answer over the network. ")
        assert (verdict.site.file, verdict.site.line) == ("/home/me/sensor.py", 7)
    else:
        assert verdict.summary.endswith(": it is at train.py:3 in main")
        assert verdict.advice.startswith("It sleeps. ")


def test_a_thread_that_holds_the_gil_of_a_rank_that_runs_says_nothing() -> None:
    frames = (Frame(function="upload", file="/home/me/io.py", line=4),)
    told = advice(hang(stack(text="with lock:"), ThreadStack(thread="uploader", frames=frames, holds_gil=True)))
    assert told.startswith("It waits for a lock: its thread uploader is at io.py:4")


def test_what_runs_while_the_interpreter_exits() -> None:
    told = advice(hang(stack(text="time.sleep(9)"), lifecycle=Lifecycle.EXITING))
    assert told.startswith("It sleeps at interpreter exit.")


def test_a_group_that_was_destroyed_too_early() -> None:
    told = advice(hang(stack(text="x = 1"), lifecycle=Lifecycle.DESTROYED))
    assert told.startswith("It called destroy_process_group while others still communicated. The others made a call more")


def test_a_stack_that_says_nothing_leaves_the_advice_as_it_was() -> None:
    assert advice(hang(stack(text="x = f(x)"))) == "Its stack shows what it does instead of joining the others."


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
        (told,) = source.with_text([ThreadStack(thread="t", frames=(Frame(function="f", file=str(program), line=line),))], 1)
        return told.frames[0].handler

    assert [handler(line) for line in (2, 4, 6, 8, 9)] == [
        None, "except (ValueError, OSError) as error", "except (ValueError, OSError) as error", "except Exception", None,
    ]  # fmt: skip
    program.write_text("except :\n this is no Python\n")
    assert handler(2) is None


def test_the_children_that_a_rank_waits_for(tmp_path: Path) -> None:
    """A process with two children, one Python and one not, as a rank that waits for them and as one that waits for a lock."""
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
    with subprocess.Popen([sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None and parent.stdin is not None
        assert parent.stdout.readline() == "ready\n"
        pyspy = PySpy(path=path)
        waits = stack(("run", f"{PYTHON}/subprocess.py"))
        try:
            found = {child.thread.rpartition(" (pid")[0]: child for child in children.awaited([waits], parent.pid, pyspy)}
            nobody = children.awaited([stack(text="with lock:")], parent.pid, pyspy)
        finally:
            parent.communicate("\n")
    assert nobody == ()
    sleeping = found.pop("child process sleep")
    assert (sleeping.frames, sleeping.main) == ((), False)
    assert "is no Python" in (sleeping.error or "")
    (python,) = found.values()
    assert python.pid is not None
    assert python.main is False
    assert python.error is not None or [f.function for f in python.frames] == ["<module>"]


def test_a_forked_child_s_stack_ends_where_it_was_born() -> None:
    born = Frame(function="BaseProcess._bootstrap", file=f"{PYTHON}/multiprocessing/process.py", line=1)
    assert children._own((USER, born, Frame(function="Popen.__init__", file="x", line=1), USER)) == (USER, born)
    assert children._own((USER,)) == (USER,)
