"""The threads that make calls, as read from a ring, and their marks in a dump of stacks."""

from __future__ import annotations

import threading
from pathlib import Path

from hangwatch.agent.node.stacks.pyspy import PySpy
from hangwatch.agent.node.stacks.sampler import collect_child_stacks, mark_callers
from hangwatch.agent.node.system.transfers import TransferMeter
from hangwatch.agent.recorder.streams import CompletionMode, StreamRecorder
from hangwatch.agent.recorder.writer import RingWriter
from hangwatch.model.ranks import Frame, ThreadStack
from hangwatch.ring.layout import RECORD_SLOTS, RecordFlag
from hangwatch.ring.reader import Caller, RingReader

from ..system.test_processes import add_process

_USER = Frame(function="step", file="/home/me/train.py", line=3)
_WAIT = Frame(function="wait", file="/usr/lib/python3.11/threading.py", line=3)


class _Ring:
    def __init__(self, folder: Path) -> None:
        self.writer = RingWriter(folder / "1-1.ring", pid=1, start_ticks=1)
        description = {"kind": "collective", "name": "0", "desc": "d", "ranks": "0-1"}
        self.streams = {
            uid: StreamRecorder(
                self.writer,
                uid,
                self.writer.open_stream(uid, description),
                unbox=lambda work: work,
            )
            for uid in (1, 2)
        }

    def make_call(self, uid: int) -> None:
        stream = self.streams[uid]
        body = stream.pack_record_body(0, 0, RecordFlag.BLOCKING)
        stream.enter_call(7, body, threading.get_ident(), CompletionMode.RETURN)
        self.writer.write_pulse(self.writer.written_count)

    def make_call_in_thread(self, uid: int) -> int:
        """Returns the operating system's id of the thread."""
        thread = threading.Thread(target=self.make_call, args=(uid,))
        thread.start()
        thread.join()
        assert thread.native_id is not None
        return thread.native_id


def test_callers_are_read_newest_first(tmp_path: Path) -> None:
    ring, here = _Ring(tmp_path), threading.get_native_id()
    ring.make_call(1)
    other = ring.make_call_in_thread(2)
    reader = RingReader(ring.writer.map)
    assert reader.read_callers() == (
        Caller(thread=other, uids=(2,)),
        Caller(thread=here, uids=(1,)),
    )
    ring.make_call(2)
    assert reader.read_callers() == (
        Caller(thread=here, uids=(2, 1)),
        Caller(thread=other, uids=()),
    ), "the newest call of group 2 is by this thread now"
    for _ in range(RECORD_SLOTS):
        ring.make_call(2)
    assert reader.read_callers() == (Caller(thread=here, uids=(2,)),), "earlier calls are gone"


def _make_threads(**tids: int | None) -> tuple[ThreadStack, ...]:
    return tuple(
        ThreadStack(
            thread=name,
            frames=(_WAIT,) if name == "idle" else (_USER,),
            main=name == "main",
            tid=tid,
        )
        for name, tid in tids.items()
    )


def test_threads_are_marked_by_their_ids() -> None:
    callers = (Caller(thread=12, uids=(2,)), Caller(thread=10, uids=(1,)))
    main, idle, trainer = mark_callers(_make_threads(main=10, idle=11, trainer=12), 10, callers)
    assert (main.call_recency, main.called_uids) == (1, (1,))
    assert (idle.call_recency, idle.called_uids) == (None, ())
    assert (trainer.call_recency, trainer.called_uids) == (0, (2,))


def test_without_ids_the_only_other_thread_in_user_code_is_the_caller() -> None:
    callers = (Caller(thread=12, uids=(2,)), Caller(thread=10, uids=(1,)))
    threads = _make_threads(main=None, idle=None, trainer=None)
    assert [t.call_recency for t in mark_callers(threads, 10, callers)] == [1, None, 0]
    threads = _make_threads(main=None, logger=None, trainer=None)
    assert [t.call_recency for t in mark_callers(threads, 10, callers)] == [1, None, None]


def test_child_without_threads_leaves_the_rank_its_stacks(tmp_path: Path) -> None:
    """A child whose interpreter ends has no threads any more."""
    for pid, parent, children in ((1, 0, (2,)), (2, 1, ())):
        add_process(tmp_path / "proc", pid, parent=parent, children=children)
    pyspy = tmp_path / "py-spy"
    pyspy.write_text("#!/bin/sh\necho '[]'\n")
    pyspy.chmod(0o755)
    frame = Frame(function="run", file="/usr/lib/python3.11/subprocess.py", line=3)
    waiting = ThreadStack(thread="MainThread", main=True, frames=(frame, _USER))
    spy = PySpy(path=str(pyspy), proc=str(tmp_path / "proc"))
    (child,) = collect_child_stacks([waiting], 1, spy, TransferMeter(spy.proc), {})
    assert (child.pid, child.frames, child.error) == (2, (), None)
