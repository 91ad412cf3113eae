"""NCCL's profiler plugin in this process (native/nccl_plugin.cpp), with HANGWATCH_NCCL=calls or device.

NCCL loads the plugin by itself, from the path in NCCL_PROFILER_PLUGIN, when it creates the first
communicator. Loading it here, earlier, gives the same library, whose table is then in the ring.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import torch

from hangwatch.ring import layout
from hangwatch.ring.layout import LiveWord

from . import faults
from .native import cache
from .native.cache import PLUGIN_VARIABLE
from .writer import RingWriter

FIRST_NCCL = (2, 27)  # the first with version 4 of the plugin's interface
_MAX_PATH = 255  # NCCL cuts a longer one
_MESSAGE = "HANGWATCH_NCCL has no effect"

Environment = MutableMapping[str, str]
# (uid of the stream, number of the call): this thread makes a call of torch. (0, 0): it made it.
MarkCall = Callable[[int, int], None]


class NcclPlugin:
    """The loaded plugin, which writes into one ring."""

    def __init__(self, path: Path, *, follows_device: bool) -> None:
        """Raises OSError if it cannot be loaded."""
        self._follows_device = follows_device
        self._lib = ctypes.PyDLL(str(path))  # its functions wait for nothing
        self._lib.hw_attach_table.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_bool)
        self._lib.hw_attach_table.restype = None
        mark: Any = self._lib.hw_set_current_call
        mark.argtypes = (ctypes.c_uint32, ctypes.c_uint64)
        mark.restype = None
        self.mark_call: MarkCall = mark
        self.mark_address = ctypes.cast(mark, ctypes.c_void_p).value or 0

    def attach_ring(self, ring: RingWriter) -> None:
        """Counts the communicators that are created from now on in the table of this ring."""
        base = ctypes.c_char.from_buffer(ring.map, ring.get_word(LiveWord.COMMUNICATORS))
        # The ring is never unmapped: NCCL may report events while the interpreter exits.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(ring.map))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(base))
        self._lib.hw_attach_table(
            ctypes.byref(base), layout.COMMUNICATOR_SLOTS, self._follows_device
        )


def load_plugin(env: Environment) -> tuple[NcclPlugin | None, str]:
    """The plugin, after naming it to NCCL in ``env``; or None and the reason, which is empty if it
    was not asked for. A profiler of the job's own is left alone.
    """
    level = cache.get_nccl_level(env)
    if level == "off":
        return None, ""
    if reason := _explain_unsupported():
        faults.record_message(f"{_MESSAGE}: {reason}")
        return None, reason
    try:
        path = cache.find_plugin(env)
        if path is None:
            return None, cache.read_plugin_failure(env) or cache.NOT_BUILT_REASON
        present = env.get(PLUGIN_VARIABLE)
        if present and present != str(path):
            reason = f"{PLUGIN_VARIABLE} names another plugin, and NCCL loads one alone"
            faults.record_message(f"{_MESSAGE}: {reason}")
            return None, reason
        if len(str(path)) > _MAX_PATH:
            raise OSError(f"NCCL reads {_MAX_PATH} bytes of a path: shorten HANGWATCH_CACHE_DIR")
        plugin = NcclPlugin(path, follows_device=level == "device")
    except OSError as error:
        faults.record_message(f"{_MESSAGE}: {error}")
        return None, str(error)
    env[PLUGIN_VARIABLE] = str(path)
    return plugin, ""


def _explain_unsupported() -> str:
    """Why NCCL here would not load the plugin; empty if it would."""
    if torch.version.cuda is None:
        return "this build of torch has no NCCL"
    try:
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]  # torch does not annotate it
    except Exception as error:  # a build of torch without NCCL
        return f"the version of NCCL cannot be read: {error}"
    if version[:2] < FIRST_NCCL:
        return f"NCCL {'.'.join(map(str, version))} is older than {FIRST_NCCL[0]}.{FIRST_NCCL[1]}"
    return ""


def load_plugin_guarded() -> tuple[NcclPlugin | None, str]:
    """`load_plugin` for this process; an error of ours leaves NCCL without the plugin."""
    found = faults.run_guarded("loading the plugin for NCCL", load_plugin, os.environ)
    return found or (None, "it could not be loaded")
