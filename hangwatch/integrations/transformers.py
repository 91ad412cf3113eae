"""The callback for Hugging Face's Trainer: ``Trainer(callbacks=[HangwatchCallback()])``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hangwatch

from .phases import OpenPhase

if TYPE_CHECKING:
    _Callback = object
else:
    from transformers import TrainerCallback as _Callback


class TransformersCallback(_Callback):
    """Declares steps, evaluations and checkpoints.

    ``evaluation_limit`` and ``checkpoint_limit`` are in seconds: how long others may wait for a
    rank in this phase before an alert. Without them, the server's ``--slow-limit`` applies.
    """

    def __init__(
        self, *, evaluation_limit: float | None = None, checkpoint_limit: float | None = None
    ) -> None:
        self._evaluation_limit = evaluation_limit
        self._checkpoint_limit = checkpoint_limit
        self._phase = OpenPhase()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._phase.leave_phase()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        hangwatch.step(state.global_step)
        self._enter_next_phase(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._enter_next_phase(control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The evaluation has ended; a checkpoint comes next, if one is due."""
        self._phase.leave_phase()
        if control.should_save:
            self._phase.enter_phase("checkpoint", self._checkpoint_limit)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._phase.leave_phase()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._phase.leave_phase()

    def _enter_next_phase(self, control: Any) -> None:
        if control.should_evaluate:
            self._phase.enter_phase("evaluation", self._evaluation_limit)
        elif control.should_save:
            self._phase.enter_phase("checkpoint", self._checkpoint_limit)


# The name by which trainings import it from any of these modules.
HangwatchCallback = TransformersCallback
