"""Records the exception that ends the process in its ring.

Two hooks see such an exception: ``sys.excepthook``, and a wrapper of the functions that
torch.multiprocessing spawns, whose exceptions never get to the former.
"""

from __future__ import annotations

import functools
import sys
import traceback
from time import monotonic_ns
from types import TracebackType
from typing import Any

from . import faults
from .rank import RankProcess, get_current_rank

_MAX_MESSAGE_CHARS = 800


def hook_exceptions() -> None:
    """Records the exception that ends the main thread, then runs the hook that was set before."""
    sys.excepthook = _RecordingExcepthook(sys.excepthook)


class _RecordingExcepthook:
    def __init__(self, previous_hook: Any) -> None:
        self._previous_hook = previous_hook

    def __call__(
        self, kind: type[BaseException], value: BaseException, trace: TracebackType | None
    ) -> None:
        _record_exception(kind, value, trace)
        self._previous_hook(kind, value, trace)


def patch_spawn() -> None:
    """Records exceptions of functions that torch.multiprocessing spawns.

    It catches such an exception, passes it to the parent, and exits, so no hook of Python sees it.
    """
    # The attribute torch.multiprocessing.spawn is the function of that name, not the module.
    spawn: Any = sys.modules["torch.multiprocessing.spawn"]
    original = spawn._wrap

    @functools.wraps(original)
    def wrap_spawned(fn: Any, *args: Any) -> Any:
        @functools.wraps(fn)
        def run_recorded(*fn_args: Any) -> Any:
            try:
                return fn(*fn_args)
            except Exception as error:
                _record_exception(type(error), error, error.__traceback__)
                raise

        return original(run_recorded, *args)

    spawn._wrap = wrap_spawned


def _record_exception(
    kind: type[BaseException], value: BaseException, trace: TracebackType | None
) -> None:
    try:
        rank = get_current_rank()
        if rank is not None:
            rank.ring.write_exception(_describe_exception(rank, kind, value, trace))
    except Exception as error:  # ours: the user's exception is shown all the same
        faults.record_fault("recording an exception", error)


def _describe_exception(
    rank: RankProcess, kind: type[BaseException], value: BaseException, trace: TracebackType | None
) -> dict[str, Any]:
    """The exception, with the innermost line of the user's code in its traceback."""
    description: dict[str, Any] = {
        "type": kind.__qualname__,
        "message": str(value)[:_MAX_MESSAGE_CHARS],
        "at_ns": monotonic_ns(),
    }
    for frame, line in reversed(list(traceback.walk_tb(trace))):
        code = frame.f_code
        if rank.recorder.sites.is_user_code(code):
            site = {"file": code.co_filename, "line": line, "function": code.co_name}
            return description | site
    return description
