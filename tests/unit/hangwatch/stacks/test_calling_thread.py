"""Which thread of a sample makes a rank's calls."""

from __future__ import annotations

from hangwatch.model.ranks import Frame, ThreadStack
from hangwatch.stacks.activities import find_calling_thread

_USER = Frame(function="step", file="/home/me/train.py", line=3)
_POOL = Frame(function="_worker", file="/usr/lib/python3.11/concurrent/futures/thread.py", line=81)
_LIBRARY = Frame(function="main_loop", file="/x/site-packages/ray/worker.py", line=5)


def _make_thread(
    name: str,
    *frames: Frame,
    recency: int | None = None,
    uids: tuple[int, ...] = (),
    pid: int | None = None,
) -> ThreadStack:
    is_main = name == "MainThread"
    return ThreadStack(
        thread=name, frames=frames, main=is_main, pid=pid, call_recency=recency, called_uids=uids
    )


def test_main_thread_without_known_calls() -> None:
    main, other = _make_thread("MainThread", _USER), _make_thread("a", _USER)
    assert find_calling_thread((main, other)) is main
    assert find_calling_thread(()) is None


def test_thread_of_newest_call() -> None:
    main = _make_thread("MainThread", _USER, recency=1, uids=(1,))
    trainer = _make_thread("trainer", _USER, recency=0, uids=(2,))
    assert find_calling_thread((main, trainer)) is trainer
    assert find_calling_thread((main, trainer), 1) is main, "it makes the calls of that group"
    assert find_calling_thread((main, trainer), 3) is trainer, "no call was made in that group"


def test_idle_pool_thread_gives_way_to_main_thread() -> None:
    main = _make_thread("MainThread", _USER)
    worker = _make_thread("worker", _POOL, recency=0, uids=(1,))
    assert find_calling_thread((main, worker)) is main


def test_actor_trains_in_thread_that_made_no_call_yet() -> None:
    main = _make_thread("MainThread", _LIBRARY, recency=0, uids=(1,))
    trainer = _make_thread("trainer", _POOL, _USER)
    assert find_calling_thread((main, trainer)) is trainer


def test_caller_in_library_code_only() -> None:
    main = _make_thread("MainThread", _LIBRARY)
    trainer = _make_thread("trainer", _LIBRARY, recency=0, uids=(1,))
    child = _make_thread("child", _USER, pid=7)
    assert find_calling_thread((main, trainer, child)) is trainer, "a child process is no thread"


def test_thread_of_torch_makes_the_calls_of_its_group() -> None:
    torch_frame = Frame(
        function="all_gather", file="/x/site-packages/torch/distributed/distributed_c10d.py", line=1
    )
    main = _make_thread("MainThread", _USER, recency=0, uids=(1,))
    saver = _make_thread("saver", torch_frame, recency=1, uids=(2,))
    assert find_calling_thread((main, saver), 2) is saver
    assert find_calling_thread((main, saver)) is main


def test_main_thread_that_exits_stands_for_its_rank() -> None:
    exiting = Frame(function="_shutdown", file="/usr/lib/python3.11/threading.py", line=1583)
    main = _make_thread("MainThread", exiting, recency=0, uids=(1,))
    uploader = _make_thread("uploader", _USER)
    assert find_calling_thread((main, uploader)) is main
