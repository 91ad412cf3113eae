"""The entry point of hangwatch in a training process: ``import torch`` ends by calling `activate`.

The module imports almost nothing: without HANGWATCH_URL, `activate` returns immediately and leaves
no trace. It never raises, since an error here would make ``import torch`` fail.
"""

from __future__ import annotations

import os
import sys

_OWN_MODULES = ("hangwatch", "hangwatch.agent", "hangwatch.agent.activation")
_activated = False


def is_enabled() -> bool:
    """Whether the environment says that this process is to be watched."""
    if not os.environ.get("HANGWATCH_URL"):
        return False
    return os.environ.get("HANGWATCH_DISABLE", "0") in ("", "0")


def activate() -> None:
    """Starts recording if the environment says so. A second call has no effect."""
    global _activated
    if not is_enabled():
        imported = {name for name in sys.modules if name.partition(".")[0] == "hangwatch"}
        if imported == set(_OWN_MODULES):  # they were imported to find this function
            for name in _OWN_MODULES:
                del sys.modules[name]
        return
    if _activated:
        return
    _activated = True
    if sys.platform != "linux":
        print(
            "hangwatch: not watching this process: it reads /proc, which only Linux has",
            file=sys.stderr,
        )
        return
    try:
        import torch.distributed as dist

        if dist.is_available():
            from .recorder import installation

            installation.install_recorder()
    except Exception as error:  # the user's `import torch` must succeed all the same
        print(
            f"hangwatch: not watching this process: {type(error).__name__}: {error}",
            file=sys.stderr,
        )
