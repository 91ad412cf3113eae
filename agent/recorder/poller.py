"""The one thread of hangwatch in a training process: it shows that Python can run, and asks which
calls are complete.
"""

from __future__ import annotations

import threading
from typing import Any

from hangwatch.ring.layout import LiveWord

from . import faults
from .kernels import Recorder
from .supervisor import Beside
from .writer import RingWriter

INTERVAL = 0.1  # seconds


class Poller:
    """A daemon thread that takes the GIL for some 20 microseconds ten times a second."""

    def __init__(self, ring: RingWriter, recorder: Recorder, beside: Beside) -> None:
        self._ring, self._recorder, self._beside = ring, recorder, beside
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hangwatch", daemon=True)
        self.steps: dict[int, int] = {}  # by id(optimizer)
        self.told_step = -1

    def start(self) -> None:
        self._count_steps()
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, so that none of ours is left when the interpreter goes."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(1.0)
        self._look()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._look()
                self._beside.look_after()
            except Exception as error:  # ours: the thread goes on
                faults.fault("polling", error)
            self._stop.wait(INTERVAL)

    def _look(self) -> None:
        self._ring.pulse(self._recorder.settle())
        self._ring.set(LiveWord.DROPPED, self._recorder.groups.dropped)
        step = self.told_step if self.told_step >= 0 else max(self.steps.values(), default=-1)
        self._ring.set(LiveWord.STEP, step + 1)

    def _count_steps(self) -> None:
        """A training step is a step of the busiest optimizer."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        steps = self.steps

        def count(optimizer: Any, args: Any, kwargs: Any) -> None:
            steps[id(optimizer)] = steps.get(id(optimizer), 0) + 1

        register_optimizer_step_post_hook(count)
