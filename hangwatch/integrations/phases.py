"""A phase that one callback begins and another one ends."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import hangwatch


class OpenPhase:
    """The phase that is open; there is at most one."""

    def __init__(self) -> None:
        self._phases = contextlib.ExitStack()

    def enter_phase(self, name: str, limit: float | None) -> None:
        """Begins a phase of up to ``limit`` seconds; an earlier one ends."""
        self.leave_phase()
        self._phases.enter_context(hangwatch.phase(name, limit))

    def leave_phase(self) -> None:
        self._phases.close()


def declare_checkpoints(owner: Any, method_name: str, limit: float | None) -> None:
    """Declares each call of a method as a checkpoint, if the object has it, and only once."""
    method: Callable[..., Any] | None = getattr(owner, method_name, None)
    if method is None or hasattr(method, "__hangwatch__"):
        return

    @functools.wraps(method)
    def call_in_phase(*args: Any, **kwargs: Any) -> Any:
        with hangwatch.phase("checkpoint", limit):
            return method(*args, **kwargs)

    call_in_phase.__hangwatch__ = True  # type: ignore[attr-defined]
    with contextlib.suppress(AttributeError):  # an object with slots
        setattr(owner, method_name, call_in_phase)
