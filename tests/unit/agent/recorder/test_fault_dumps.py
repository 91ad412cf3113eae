"""The recorder's thread writes the stacks of all threads when the node agent requests them."""

from __future__ import annotations

import gc
import json
import sys
import threading
import weakref
from pathlib import Path

import pytest

from hangwatch.agent.environment import run_dir
from hangwatch.agent.node.stacks.faulthandler_dumps import parse_stacks
from hangwatch.agent.recorder import stack_dumps
from hangwatch.agent.recorder.stack_dumps import StackDumper
from hangwatch.agent.recorder.writer import RingWriter
from hangwatch.ring.layout import LiveWord


@pytest.fixture
def ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RingWriter:
    monkeypatch.setattr(stack_dumps, "register_dump_signal", lambda path: {})
    return RingWriter(tmp_path / "1-1.ring", pid=1, start_ticks=1)


def read_stacks(ring: RingWriter) -> str:
    return ring.path.with_suffix(run_dir.STACKS_SUFFIX).read_text()


class Activations:
    """An object as large as a job's activations."""


def test_stacks_are_written_once_for_each_request(ring: RingWriter) -> None:
    dumper = StackDumper(ring)
    dumper.answer_request()
    assert not ring.path.with_suffix(run_dir.STACKS_SUFFIX).exists()
    for request in (7, 8):
        ring.set_word(LiveWord.STACKS_REQUEST, request)
        dumper.answer_request()
        assert ring.get_word(LiveWord.STACKS_ANSWER) == request
        main = threading.main_thread().ident
        stacks = parse_stacks(read_stacks(ring), main)
        functions = [frame.function for frame in stacks[0].frames]
        assert "test_stacks_are_written_once_for_each_request" in functions
        ring.path.with_suffix(run_dir.STACKS_SUFFIX).unlink()
    dumper.answer_request()
    assert not ring.path.with_suffix(run_dir.STACKS_SUFFIX).exists()


def test_a_dump_keeps_nothing_of_other_threads_alive(ring: RingWriter) -> None:
    entered, leave = threading.Event(), threading.Event()
    kept: list[weakref.ref[Activations]] = []

    def train_step() -> None:
        activations = Activations()
        kept.append(weakref.ref(activations))
        entered.set()
        leave.wait()

    thread = threading.Thread(target=train_step, name="trainer")
    thread.start()
    entered.wait()
    gc.disable()
    try:
        dumper = StackDumper(ring)
        ring.set_word(LiveWord.STACKS_REQUEST, 1)
        dumper.answer_request()
        assert "train_step" in read_stacks(ring)
        leave.set()
        thread.join()
        assert kept[0]() is None
    finally:
        gc.enable()


def test_threads_are_listed_before_stacks_are_requested(ring: RingWriter) -> None:
    dumper = StackDumper(ring)
    dumper.answer_request()
    entries = json.loads(ring.path.with_suffix(run_dir.THREADS_SUFFIX).read_bytes())
    assert [threading.get_ident(), threading.get_native_id(), "MainThread"] in entries


def test_without_the_gil_no_thread_is_stopped(
    ring: RingWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    dumper = StackDumper(ring)
    ring.set_word(LiveWord.STACKS_REQUEST, 1)
    dumper.answer_request()
    assert read_stacks(ring) == run_dir.NO_GIL_TEXT
