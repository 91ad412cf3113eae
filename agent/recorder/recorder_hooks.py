"""Numbers the groups that torch's Flight Recorder watches by a hook, as torch does.

From 2.15 on, torch records the calls of a backend without a Flight Recorder of its own by a hook on
its process group. `nccl2`, the default for NCCL, is such a backend. The counters of a group have
the number of its hook: its position in the order in which this process attached hooks, from 0
(``next_pg_id`` in torch/csrc/distributed/c10d/hooks/FlightRecorderHook.cpp). Neither the hook nor
the backend reports the number, so hooks are counted here as they are attached.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

FIRST_TORCH_RELEASE = (2, 15)

_next_number = itertools.count()
_numbers_by_group: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def count_attached_hooks() -> None:
    """Counts the hooks that are attached from now on. To be called before the first group is
    created; does nothing in a torch without such hooks.
    """
    hook_class = _find_hook_class()
    if hook_class is None or hasattr(hook_class.attach, "__hangwatch__"):
        return
    attach = hook_class.attach

    def attach_and_count(pg: Any, *args: Any, **kwargs: Any) -> Any:
        number = next(_next_number)  # torch counts those that it fails to attach, too
        hook = attach(pg, *args, **kwargs)
        _numbers_by_group[pg] = number
        return hook

    attach_and_count.__hangwatch__ = True  # type: ignore[attr-defined]
    hook_class.attach = staticmethod(attach_and_count)


def has_recorder_hooks() -> bool:
    """Whether this torch records backends by hooks, and the hooks are counted."""
    hook_class = _find_hook_class()
    return hook_class is not None and hasattr(hook_class.attach, "__hangwatch__")


def find_hook_number(group: Any) -> int | None:
    """The number of a process group's hook; None if it has none."""
    return _numbers_by_group.get(group)


def _find_hook_class() -> Any:
    import torch

    # In 2.14, torch attaches no hooks by itself and has one recorder for all backends.
    if tuple(map(int, torch.__version__.split(".")[:2])) < FIRST_TORCH_RELEASE:
        return None
    from torch._C import _distributed_c10d

    return getattr(_distributed_c10d, "FlightRecorderHook", None)
