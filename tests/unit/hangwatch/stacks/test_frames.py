"""Whose code a frame is, and whether a thread waits for communication, by the frames of its stack."""

from __future__ import annotations

from pathlib import Path

from hangwatch.agent import recorder
from hangwatch.model.ranks import Frame, ThreadStack
from hangwatch.stacks.frames import (
    RECORDER_MODULES,
    find_user_frame,
    is_library,
    remember_answer,
    waits_for_communication,
    waits_for_work,
)

PACKAGES = "/usr/lib/python3.11/site-packages"
LINE = Frame(function="main", file="/home/me/train.py", line=7, text="dist.send(hidden, dst=1)")
TORCH = Frame(
    function="send", file=f"{PACKAGES}/torch/distributed/distributed_c10d.py", line=3385, text=""
)
KERNEL = "agent/recorder/python_kernel.py"


def make_stack(*frames: Frame) -> ThreadStack:
    return ThreadStack(thread="MainThread", active=False, frames=frames)


def test_recorder_modules_are_listed_and_are_not_user_code() -> None:
    folder = Path(recorder.__file__).parent
    paths = [path.relative_to(folder) for path in folder.rglob("*.py")]
    modules = {path.with_suffix("").as_posix() for path in paths if path.stem != "__init__"}
    assert modules == set(RECORDER_MODULES)
    assert all(is_library(f"/root/src/agent/recorder/{module}.py") for module in modules)


def test_thread_inside_the_recorders_kernel_waits_in_the_recorded_call() -> None:
    for folder in ("/src", f"{PACKAGES}/hangwatch"):
        kernel = Frame(function="c10d_kernel", file=f"{folder}/{KERNEL}", line=115, text="run()")
        stack = make_stack(kernel, TORCH, LINE)
        assert waits_for_communication(stack) is True
        assert waits_for_work(stack) is True


def test_thread_in_its_own_code_does_not_wait() -> None:
    sleeping = Frame(function="upload", file="/home/me/train.py", line=3, text="time.sleep(600)")
    assert waits_for_communication(make_stack(sleeping, LINE)) is False
    assert waits_for_work(make_stack(sleeping, LINE)) is False


def test_generated_code_is_the_users_line_only_where_there_is_no_other() -> None:
    """Libraries make functions by ``exec``, such as the methods of multiprocessing's proxies."""
    made = Frame(function="get", file="<string>", line=2)
    main = Frame(function="<module>", file="<string>", line=5)
    assert find_user_frame((made, TORCH, LINE)) == LINE
    assert find_user_frame((TORCH, made, main)) == made
    assert find_user_frame((TORCH,)) is None


def test_deep_stack_is_searched_once() -> None:
    searched: list[tuple[ThreadStack, str]] = []

    @remember_answer
    def find_depth(stack: ThreadStack | None, unit: str = "") -> str:
        if stack is not None:
            searched.append((stack, unit))
        return "no stack" if stack is None else f"{len(stack.frames)}{unit}"

    stack, equal, deeper = make_stack(LINE), make_stack(LINE), make_stack(TORCH, LINE)
    for _ in range(3):
        assert [find_depth(each) for each in (stack, deeper, None)] == ["1", "2", "no stack"]
        assert find_depth(stack, " frames") == "1 frames"
    assert searched == [(stack, ""), (deeper, ""), (stack, " frames")]
    assert (stack, hash(stack)) == (equal, hash(equal)), "what was found is no part of it"
