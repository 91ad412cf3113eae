"""The one thread of hangwatch in a training process: it shows that Python can run, and asks which
calls are complete.
"""

from __future__ import annotations

import threading
from time import monotonic_ns
from typing import Any

from hangwatch.model.threads import RECORDER_THREAD_NAME
from hangwatch.ring.layout import LiveWord

from . import faults
from .device_status import DeviceStatusReader
from .fault_dumps import StackDumper
from .recorder import Recorder
from .supervisor import AgentSupervisor
from .writer import RingWriter

POLL_INTERVAL_S = 0.1  # seconds


class Poller:
    """A daemon thread that takes the GIL for some 20 microseconds ten times a second."""

    def __init__(
        self,
        ring: RingWriter,
        recorder: Recorder,
        supervisor: AgentSupervisor,
        stack_dumper: StackDumper,
    ) -> None:
        self._ring, self._recorder, self._supervisor = ring, recorder, supervisor
        self._stack_dumper = stack_dumper
        self._device_status = DeviceStatusReader(ring, recorder)
        self._stop_event = threading.Event()
        self._thread = threading.Thread(
            target=self._run_loop, name=RECORDER_THREAD_NAME, daemon=True
        )
        self.steps_by_optimizer: dict[int, int] = {}  # by id(optimizer)
        self.declared_step = -1

    def start_thread(self) -> None:
        self._hook_optimizer_steps()
        self._thread.start()

    def stop_thread(self) -> None:
        """Ends the thread, so that none of ours is left when the interpreter goes."""
        self._stop_event.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(1.0)
        self._poll_once()

    def _run_loop(self) -> None:
        self._stack_dumper.start_answering()
        while not self._stop_event.is_set():
            try:
                call_count = self._poll_once()
                self._stack_dumper.answer_request()
                self._device_status.update_ring(call_count, monotonic_ns())
                self._supervisor.ensure_agent()
            except Exception as error:  # ours: the thread goes on
                faults.record_fault("polling", error)
            self._stop_event.wait(POLL_INTERVAL_S)
        self._stack_dumper.stop_answering()

    def _poll_once(self) -> int:
        """Returns the number of calls recorded so far."""
        call_count = self._recorder.update_streams()
        self._ring.write_pulse(call_count)
        self._ring.set_word(LiveWord.DROPPED, self._recorder.count_dropped())
        step = (
            self.declared_step
            if self.declared_step >= 0
            else max(self.steps_by_optimizer.values(), default=-1)
        )
        self._ring.set_word(LiveWord.STEP, step + 1)
        return call_count

    def _hook_optimizer_steps(self) -> None:
        """A training step is a step of the busiest optimizer."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        steps = self.steps_by_optimizer

        def count_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            steps[id(optimizer)] = steps.get(id(optimizer), 0) + 1

        register_optimizer_step_post_hook(count_step)
