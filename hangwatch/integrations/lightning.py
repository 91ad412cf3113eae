"""The callback for Lightning: ``Trainer(callbacks=[HangwatchCallback()])``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import hangwatch

from .phases import OpenPhase, declare_checkpoints

if TYPE_CHECKING:
    _Callback = object
elif "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
    from pytorch_lightning import Callback as _Callback
else:
    from lightning.pytorch import Callback as _Callback


class LightningCallback(_Callback):
    """Declares steps, the sanity check, validation, tests, predictions and checkpoints.

    ``validation_limit`` and ``checkpoint_limit`` are in seconds: how long others may wait for a
    rank in this phase before an alert. Without them, the server's ``--slow-limit`` applies.
    """

    def __init__(
        self, *, validation_limit: float | None = None, checkpoint_limit: float | None = None
    ) -> None:
        super().__init__()
        self._validation_limit = validation_limit
        self._checkpoint_limit = checkpoint_limit
        self._phase = OpenPhase()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        declare_checkpoints(trainer, "save_checkpoint", self._checkpoint_limit)

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        hangwatch.step(trainer.global_step)

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        self._phase.enter_phase("sanity check", self._validation_limit)

    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
        self._phase.leave_phase()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._phase.enter_phase("validation", self._validation_limit)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._phase.leave_phase()

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        self._phase.enter_phase("test", self._validation_limit)

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        self._phase.leave_phase()

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        self._phase.enter_phase("prediction", self._validation_limit)

    def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
        self._phase.leave_phase()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._phase.leave_phase()


# The name by which trainings import it from any of these modules.
HangwatchCallback = LightningCallback
