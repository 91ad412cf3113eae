"""Knows whether the job scales its loss, and counts its rounds of training.

Loss scaling tries how far it can go: gradients with Inf or NaN are its everyday life, which it
answers by leaving out the step. Only where they stay for many rounds is something wrong.
"""

from __future__ import annotations

import functools
from typing import Any

from .. import faults


class LossScalingTracker:
    """``active`` once an enabled `torch.amp.GradScaler` was made; ``rounds`` are its updates, else
    the optimizers' steps.
    """

    def __init__(self) -> None:
        self.is_active = False
        self.rounds = 0

    def install_hooks(self) -> None:
        """From now on, in this process."""
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
            except Exception as error:  # ours: the scaler is made
                faults.record_fault("looking at a GradScaler", error)

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
