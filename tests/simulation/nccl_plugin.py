"""Calls an NCCL profiler plugin as NCCL does, without NCCL or a GPU: one communicator's events, in
the layout of version 5 of the interface (of version 4, where that differs).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COLLECTIVE, MESSAGE, KERNEL, COLLECTIVE_CALL, MESSAGE_CALL = 2, 4, 64, 512, 1024
KERNEL_ENDED = 22
CHANNELS = 2


class _Call(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_char_p), ("count", ctypes.c_size_t), ("dtype", ctypes.c_char_p),
        ("root", ctypes.c_int), ("stream", ctypes.c_void_p), ("captured", ctypes.c_bool),
    )  # fmt: skip


class _Collective(ctypes.Structure):
    _fields_ = (
        ("number", ctypes.c_uint64), ("function", ctypes.c_char_p), ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p), ("count", ctypes.c_size_t), ("root", ctypes.c_int),
        ("dtype", ctypes.c_char_p), ("channels", ctypes.c_uint8), ("warps", ctypes.c_uint8),
        ("algorithm", ctypes.c_char_p), ("protocol", ctypes.c_char_p),
    )  # fmt: skip


class _Content(ctypes.Union):
    _fields_ = (("call", _Call), ("collective", _Collective), ("all", ctypes.c_uint64 * 16))


class _Event(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_uint64), ("parent", ctypes.c_void_p), ("rank", ctypes.c_int),
        ("content", _Content),
    )  # fmt: skip


_HANDLE = ctypes.POINTER(ctypes.c_void_p)
_START = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, _HANDLE, ctypes.POINTER(_Event))
_RECORD = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
_END = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_MASK = ctypes.POINTER(ctypes.c_int)
_INIT_V5 = ctypes.CFUNCTYPE(
    ctypes.c_int, _HANDLE, ctypes.c_uint64, _MASK, ctypes.c_char_p, ctypes.c_int, ctypes.c_int,
    ctypes.c_int, ctypes.c_void_p,
)  # fmt: skip
_INIT_V4 = ctypes.CFUNCTYPE(
    ctypes.c_int, _HANDLE, _MASK, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_int,
    ctypes.c_int, ctypes.c_void_p,
)  # fmt: skip


def _make_plugin_type(init: Any) -> type[ctypes.Structure]:
    class Plugin(ctypes.Structure):
        _fields_ = (
            ("name", ctypes.c_char_p), ("init", init), ("start", _START), ("stop", _END),
            ("record", _RECORD), ("finalize", _END),
        )  # fmt: skip

    return Plugin


_PLUGIN_TYPES = {4: _make_plugin_type(_INIT_V4), 5: _make_plugin_type(_INIT_V5)}


class NcclLibrary:
    """One version of the interface of a plugin."""

    def __init__(self, path: Path, version: int = 5) -> None:
        self.version = version
        self.plugin: Any = _PLUGIN_TYPES[version].in_dll(
            ctypes.CDLL(str(path)), f"ncclProfiler_v{version}"
        )
        self.mask = ctypes.c_int(0)


@dataclass(slots=True)
class _Enqueued:
    handle: int | None
    kernels: list[int | None] = field(default_factory=list)


class SimulatedCommunicator:
    """A communicator whose plugin is called. Raises RuntimeError if the plugin refuses it."""

    def __init__(
        self, library: NcclLibrary, id_: int, rank: int, size: int, name: str = ""
    ) -> None:
        self._library = library
        self._rank = rank
        self._context = ctypes.c_void_p()
        init = library.plugin.init
        mask, context = ctypes.byref(library.mask), ctypes.byref(self._context)
        if library.version == 4:
            status = init(context, mask, name.encode(), id_, 1, size, rank, None)
        else:
            status = init(context, id_, mask, name.encode(), 1, size, rank, None)
        if status:
            raise RuntimeError("the plugin refuses the communicator")

    def call(
        self,
        function: str = "AllReduce",
        count: int = 1000,
        dtype: str = "ncclFloat32",
        root: int = 0,
        *,
        is_captured: bool = False,
        is_enqueued: bool = True,
    ) -> _Enqueued:
        """A collective that the host calls and, with ``is_enqueued``, passes to the device."""
        event = _Event(type=COLLECTIVE_CALL)
        event.content.call = _Call(
            function.encode(), count, dtype.encode(), root, None, is_captured
        )
        parent = self._start(event)
        if not is_enqueued:
            return _Enqueued(None)
        event = _Event(type=COLLECTIVE, parent=parent)
        event.content.collective = _Collective(
            0,
            function.encode(),
            None,
            None,
            count,
            root,
            dtype.encode(),
            CHANNELS,
            16,
            b"RING",
            b"LL",
        )
        return _Enqueued(self._start(event))

    def send_message(self) -> None:
        self._start(_Event(type=MESSAGE_CALL))

    def begin(self, enqueued: _Enqueued) -> None:
        """The device begins the collective."""
        for _ in range(CHANNELS):
            enqueued.kernels.append(self._start(_Event(type=KERNEL, parent=enqueued.handle)))

    def end(self, enqueued: _Enqueued) -> None:
        """The device ends the collective."""
        for kernel in enqueued.kernels:
            if kernel:
                self._library.plugin.record(kernel, KERNEL_ENDED, None)
                self._library.plugin.stop(kernel)

    def destroy(self) -> None:
        self._library.plugin.finalize(self._context)

    def _start(self, event: _Event) -> int | None:
        if not event.type & self._library.mask.value:
            return None
        event.rank = self._rank
        handle = ctypes.c_void_p()
        self._library.plugin.start(self._context, ctypes.byref(handle), ctypes.byref(event))
        return handle.value
