"""Knows whether the job scales its loss, and counts its rounds of training.

Loss scaling tries how far it can go: gradients with Inf or NaN are its everyday life, which it
answers by leaving out the step. Only where they stay for many rounds is something wrong.
"""

from __future__ import annotations

import functools
from typing import Any

from .. import faults


class Scaling:
    """``active`` once an enabled `torch.amp.GradScaler` was made; ``rounds`` are its updates, else
    the optimizers' steps.
    """

    def __init__(self) -> None:
        self.active = False
        self.rounds = 0

    def watch(self) -> None:
        """From now on, in this process."""
        from torch.amp.grad_scaler import GradScaler
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(self._stepped)
        scaler: Any = GradScaler
        original = scaler.__init__

        @functools.wraps(original)
        def init(made: Any, *args: Any, **kwargs: Any) -> None:
            original(made, *args, **kwargs)
            try:
                self._made(made)
            except Exception as error:  # ours: the scaler is made
                faults.fault("looking at a GradScaler", error)

        scaler.__init__ = init

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self.active:
            self.rounds += 1

    def _made(self, scaler: Any) -> None:
        if not scaler.is_enabled():
            return
        self.active = True
        owner: Any = next(cls for cls in type(scaler).__mro__ if "update" in vars(cls))
        original = owner.update
        if hasattr(original, "__hangwatch__"):
            return

        @functools.wraps(original)
        def update(this: Any, *args: Any, **kwargs: Any) -> Any:
            self.rounds += 1
            return original(this, *args, **kwargs)

        update.__hangwatch__ = True  # type: ignore[attr-defined]
        owner.update = update
