"""Tracks whether the job uses loss scaling, and counts its rounds of training.

Loss scaling tries ever larger scales: gradients with Inf or NaN are normal then, and it skips the
step. Something is wrong only if they persist for many rounds.
"""

from __future__ import annotations

import functools
from typing import Any

from .. import faults


class LossScalingTracker:
    """``is_active`` once an enabled `torch.amp.GradScaler` was created; ``rounds`` counts its updates,
    without one the optimizers' steps.
    """

    def __init__(self) -> None:
        self.is_active = False
        self.rounds = 0

    def install_hooks(self) -> None:
        """Starts tracking in this process."""
        from torch.amp.grad_scaler import GradScaler
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(self._count_step)
        scaler: Any = GradScaler
        original = scaler.__init__

        @functools.wraps(original)
        def tracked_init(instance: Any, *args: Any, **kwargs: Any) -> None:
            original(instance, *args, **kwargs)
            try:
                self._track_scaler(instance)
            except Exception as error:  # ours: the scaler works without it
                faults.record_fault("tracking a GradScaler", error)

        scaler.__init__ = tracked_init

    def _count_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self.is_active:
            self.rounds += 1

    def _track_scaler(self, scaler: Any) -> None:
        if not scaler.is_enabled():
            return
        self.is_active = True
        owner: Any = next(cls for cls in type(scaler).__mro__ if "update" in vars(cls))
        original = owner.update
        if hasattr(original, "__hangwatch__"):
            return

        @functools.wraps(original)
        def counted_update(instance: Any, *args: Any, **kwargs: Any) -> Any:
            self.rounds += 1
            return original(instance, *args, **kwargs)

        counted_update.__hangwatch__ = True  # type: ignore[attr-defined]
        owner.update = counted_update
