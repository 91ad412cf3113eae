"""A call that raised an exception before it communicated is taken back: the next one gets its number,
and the same running hash as without it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hangwatch.agent.node.reporting.acked import UnackedHistory
from hangwatch.agent.recorder.calls import FailureOutcome, FailureRule, judge_failure
from hangwatch.agent.recorder.streams import CompletionMode, EnteredCall, StreamRecorder
from hangwatch.agent.recorder.writer import RingWriter
from hangwatch.model.calls import Loss, LossReason, Signature, encode_signature
from hangwatch.ring.reader import RingReader, StreamState


class RecordedStream:
    def __init__(self, path: Path) -> None:
        self.ring = RingWriter(path, pid=os.getpid(), start_ticks=1)
        self.ring.write_identity({})
        described = {"kind": "collective", "name": "0", "desc": "d", "ranks": "0-1"}
        slot = self.ring.open_stream(1, described)
        self.stream = StreamRecorder(self.ring, 1, slot, unbox=lambda work: work)
        self.reader = RingReader(self.ring.map)

    def enter_call(self, op: str) -> EnteredCall:
        agree = sum(op.encode())
        number = self.ring.intern_signature(encode_signature(Signature(op=op, agree=agree)))
        body = self.stream.pack_record_body(number, 0, 0)
        return self.stream.enter_call(agree, body, 0, CompletionMode.RETURN)

    def make_calls(self, *ops: str) -> None:
        for op in ops:
            self.stream.finish_call(self.enter_call(op))

    def read_state(self) -> StreamState:
        (state,) = self.reader.read_snapshot(0).streams
        return state

    def poll(self) -> None:
        """Polls as the recorder's thread does."""
        self.stream.update_ring(0)
        self.ring.write_pulse(self.ring.written_count)


@pytest.fixture
def recorded(tmp_path: Path) -> RecordedStream:
    return RecordedStream(tmp_path / "a.ring")


@pytest.fixture
def expected(tmp_path: Path) -> RecordedStream:
    """A stream without the call that raises."""
    return RecordedStream(tmp_path / "b.ring")


@pytest.mark.parametrize("is_polled", [False, True])
def test_next_call_replaces_a_retracted_one(
    recorded: RecordedStream, expected: RecordedStream, is_polled: bool
) -> None:
    recorded.make_calls("broadcast")
    raising = recorded.enter_call("gather")
    if is_polled:
        recorded.poll()
    recorded.stream.retract_call(raising)
    expected.make_calls("broadcast")
    after = recorded.read_state()
    assert (after.entered, after.chain) == (1, expected.read_state().chain)
    recorded.make_calls("all_reduce", "barrier")
    expected.make_calls("all_reduce", "barrier")
    state = recorded.read_state()
    assert (state.entered, state.completed, state.chain) == (3, 3, expected.read_state().chain)
    assert state.loss is None
    assert recorded.reader.read_delta(0).chains == expected.reader.read_delta(0).chains
    calls = recorded.reader.read_calls(1, 0)
    assert [(call.seq, call.signature.op) for call in calls] == [
        (1, "broadcast"),
        (2, "all_reduce"),
        (3, "barrier"),
    ]
    before = calls[1].preceded_by
    assert before is not None
    assert (before.seq, before.signature.op, before.raised) == (2, "gather", True)


def test_numbers_are_uncertain_if_another_call_came_in_between(recorded: RecordedStream) -> None:
    raising = recorded.enter_call("gather")
    recorded.make_calls("all_reduce")
    recorded.stream.retract_call(raising)
    state = recorded.read_state()
    assert (state.entered, state.loss) == (2, Loss(1, LossReason.RAISED))


def test_history_tells_which_calls_were_read_before(recorded: RecordedStream) -> None:
    history = UnackedHistory()

    def read_ring() -> list[tuple[int, int]]:
        return history.add_delta(recorded.reader.read_delta(history.cursor))

    recorded.make_calls("broadcast")
    recorded.stream.retract_call(recorded.enter_call("gather"))
    assert read_ring() == [], "it was not read before"
    assert read_ring() == [], "it was known to be retracted"
    raising = recorded.enter_call("gather")
    assert read_ring() == []
    recorded.stream.retract_call(raising)
    recorded.make_calls("barrier")
    assert read_ring() == [(1, 2)]
    assert read_ring() == [], "it was returned before"
    assert history.chains == recorded.reader.read_delta(0).chains


CUDA_ERROR = RuntimeError("CUDA error: an illegal memory access was encountered")
GLOO_ERROR = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed")  # fmt: skip


def test_kinds_of_exceptions() -> None:
    from torch.distributed import DistBackendError

    root = RuntimeError("ProcessGroupGloo::broadcast: invalid root rank: 7")
    for error, by_argument, by_check in (
        (ValueError("wrong"), FailureOutcome.NOT_MADE, FailureOutcome.NOT_MADE),
        (NotImplementedError("none"), FailureOutcome.NOT_MADE, FailureOutcome.NOT_MADE),
        (root, FailureOutcome.UNKNOWN, FailureOutcome.NOT_MADE),
        (DistBackendError("NCCL"), FailureOutcome.COMMUNICATED, FailureOutcome.COMMUNICATED),
        (GLOO_ERROR, FailureOutcome.UNKNOWN, FailureOutcome.COMMUNICATED),
        (CUDA_ERROR, FailureOutcome.UNKNOWN, FailureOutcome.UNKNOWN),
        (MemoryError(), FailureOutcome.UNKNOWN, FailureOutcome.UNKNOWN),
        (KeyboardInterrupt(), FailureOutcome.COMMUNICATED, FailureOutcome.COMMUNICATED),
    ):
        assert judge_failure(error, FailureRule.NONE) is FailureOutcome.COMMUNICATED
        assert judge_failure(error, FailureRule.ARGUMENT_ERRORS) is by_argument, repr(error)
        assert judge_failure(error, FailureRule.CHECKS) is by_check, repr(error)


def test_exception_that_python_code_raised_does_not_show_that_a_call_was_not_made() -> None:
    def call_backend() -> None:
        raise ValueError("of a backend in Python, or of a signal handler")

    def catch_in_kernel(operator: Callable[[], Any]) -> BaseException:
        try:
            operator()
        except ValueError as error:
            return error
        raise AssertionError

    error = catch_in_kernel(call_backend)
    assert judge_failure(error, FailureRule.ARGUMENT_ERRORS) is FailureOutcome.UNKNOWN
    assert judge_failure(error, FailureRule.CHECKS) is FailureOutcome.COMMUNICATED
    # As the kernel calls the operator: code in C raises, with no frame of its own.
    error = catch_in_kernel(functools.partial(int, "no number"))
    assert judge_failure(error, FailureRule.ARGUMENT_ERRORS) is FailureOutcome.NOT_MADE
