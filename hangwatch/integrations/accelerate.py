"""Phases of Accelerate: ``declare_phases(accelerator)``."""

from __future__ import annotations

from typing import Any

from .phases import declare_checkpoints

_CHECKPOINT_METHODS = ("save_state", "load_state", "save_model", "save")


def declare_phases(accelerator: Any, *, checkpoint_limit: float | None = None) -> None:
    """Declares what an ``Accelerator`` saves and loads as the phase ``checkpoint``.

    ``checkpoint_limit``, in seconds, is how long others may wait for a rank in it before an alert.
    Without it, the server's ``--slow-limit`` applies.
    """
    for method_name in _CHECKPOINT_METHODS:
        declare_checkpoints(accelerator, method_name, checkpoint_limit)
