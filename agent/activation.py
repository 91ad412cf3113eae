"""The door through which hangwatch enters a process: torch calls `activate` at the end of ``import
torch``.

Standard library only, and next to nothing of it: without HANGWATCH_URL this returns at once and
leaves no trace. It can never raise, since an error here would fail ``import torch``.
"""

from __future__ import annotations

import os
import sys

_OWN_MODULES = ("hangwatch", "hangwatch.agent", "hangwatch.agent.activation")
_activated = False


def is_enabled() -> bool:
    """The environment asks for watching this process."""
    return bool(os.environ.get("HANGWATCH_URL")) and os.environ.get("HANGWATCH_DISABLE", "0") in (
        "",
        "0",
    )


def activate() -> None:
    """Starts recording where the environment asks for it. Calling it again changes nothing."""
    global _activated
    if not is_enabled():
        _unload_modules()
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
        from .recorder.installation import install_recorder

        install_recorder()
    except Exception as error:  # ours, whatever it is: the user's `import torch` goes on
        print(
            f"hangwatch: not watching this process: {type(error).__name__}: {error}",
            file=sys.stderr,
        )


def _unload_modules() -> None:
    """Takes back what finding this function imported, unless somebody uses hangwatch here."""
    if {
        name for name in sys.modules if name == "hangwatch" or name.startswith("hangwatch.")
    } == set(_OWN_MODULES):
        for name in _OWN_MODULES:
            del sys.modules[name]
