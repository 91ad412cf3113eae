"""Python's side of the recorder in C++: which recorder serves, and how the two speak.
`recorder.cpp` says how it works.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hangwatch.ring.layout import RECORD_SLOTS

from .. import faults
from ..call_reader import Read
from ..checks.settings import RECORDER, asked
from ..streams import End, Entered, Sequence
from ..writer import RingWriter
from . import cache
from .frames import Layout, layout

_HALF = 1 << 63


class _Call(ctypes.Structure):
    """A call under way, as in recorder.cpp."""

    _fields_ = (
        ("sequence", ctypes.c_void_p), ("seq", ctypes.c_uint64), ("index", ctypes.c_uint64),
        ("entered_ns", ctypes.c_uint64), ("blocked", ctypes.c_uint64), ("end", ctypes.c_int),
    )  # fmt: skip


def choose(env: Mapping[str, str]) -> tuple[Native | None, str]:
    """The native recorder, or why there is none. HANGWATCH_RECORDER=native says so aloud, as the
    user has asked for it.
    """
    wanted = cache.wanted(env)
    if wanted == "python":
        return None, "HANGWATCH_RECORDER=python"
    native, why = (None, RECORDER) if asked(env).anything else _load(env)
    if native is None and wanted == "native":
        faults.note(f"the native recorder cannot be had, the Python one serves: {why}")
    return native, why


@functools.cache
def _registered(path: Path) -> Native:
    return Native(path)


def _load(env: Mapping[str, str]) -> tuple[Native | None, str]:
    if why := cache.unfit():
        return None, why
    path = cache.path(env)
    try:
        cache.check(path)
        return _registered(path), ""
    except FileNotFoundError:
        return None, cache.failure(path) or cache.NOT_BUILT
    except OSError as error:
        return None, str(error)


class Native:
    """The loaded library, of which a process has one."""

    def __init__(self, path: Path) -> None:
        """Raises OSError where it cannot be loaded."""
        self._lib = ctypes.CDLL(
            str(path)
        )  # its functions run without the GIL: they may wait for what needs it
        self._brief = ctypes.PyDLL(
            str(path)
        )  # these keep it, and never wait for anybody who wants it
        for name in ("hw_attach", "hw_open"):
            getattr(self._lib, name).restype = ctypes.c_void_p
        for name in ("hw_watch", "hw_last_fault"):
            getattr(self._lib, name).restype = ctypes.c_char_p
        for name in ("hw_settle", "hw_faults"):
            getattr(self._lib, name).restype = ctypes.c_uint64
        self._recorder = ctypes.c_void_p()
        self._kept: list[Any] = []
        self._faults = 0
        self._lib.hw_start(layout() or Layout())

    def attach(self, ring: RingWriter) -> None:
        """Records into ``ring`` from the next `use` on."""
        base = ctypes.c_char.from_buffer(ring.map)
        ctypes.pythonapi.Py_IncRef(
            ctypes.py_object(ring.map)
        )  # mapped to the very end: a backend's thread may note a call's end then
        self._kept.append(base)  # a thread may still write into an earlier one
        self._recorder = ctypes.c_void_p(
            self._lib.hw_attach(
                ctypes.byref(base), ctypes.c_uint64(ring.records_at), ctypes.c_uint64(RECORD_SLOTS)
            )
        )

    def watch(self, name: str) -> None:
        """Registers the kernel of an operator. Raises RuntimeError where torch refuses it."""
        if problem := self._lib.hw_watch(name.encode()):
            raise RuntimeError(problem.decode(errors="replace"))

    def use(self) -> None:
        self._lib.hw_use(self._recorder)

    def settle(self) -> int:
        written: int = self._lib.hw_settle(self._recorder)
        count: int = self._lib.hw_faults()
        if count != self._faults:
            self._faults = count
            faults.note(
                f"the native recorder: {self._lib.hw_last_fault().decode(errors='replace')}"
            )
        return written

    def forget(self) -> None:
        """What was interned is about to be overwritten, or a group is gone."""
        self._brief.hw_forget_plans(self._recorder)

    def judge(self, code: int, verdict: int | None) -> None:
        if verdict is None:
            self._brief.hw_forget_codes(self._recorder)
        else:
            self._brief.hw_judge(self._recorder, ctypes.c_uint64(code), ctypes.c_uint8(verdict))

    def open(self, uid: int, slot: int) -> int:
        """A sequence's handle."""
        handle: int = self._lib.hw_open(self._recorder, ctypes.c_uint32(uid), ctypes.c_uint64(slot))
        return handle

    def close(self, handle: int) -> None:
        self._lib.hw_close(self._recorder, ctypes.c_void_p(handle))

    def enter(self, handle: int, agree: int, described: bytes, blocked: int, end: int) -> _Call:
        call = _Call()
        self._lib.hw_enter(
            self._recorder,
            ctypes.c_void_p(handle),
            ctypes.c_uint64(agree),
            described,
            ctypes.c_uint64(blocked),
            end,
            ctypes.byref(call),
        )
        return call

    def finish(self, call: _Call, *, raised: bool) -> None:
        self._lib.hw_finish(self._recorder, ctypes.byref(call), ctypes.c_bool(raised))

    def frames(self, most: int = 256) -> list[tuple[int, int]]:
        """(id of the code, its instruction) of the calling thread's frames, as the library sees
        them, newest first.
        """
        codes, instructions = (ctypes.c_uint64 * most)(), (ctypes.c_uint32 * most)()
        count = self._brief.hw_frames(codes, instructions, most)
        return list(zip(codes[:count], instructions[:count], strict=True))


class NativeSequence(Sequence):
    """A `Sequence` whose state is in the library; Python's own calls are recorded through it."""

    __slots__ = ("_handle", "_native")

    def __init__(self, native: Native, ring: RingWriter, uid: int, slot: int) -> None:
        self.uid, self.slot = uid, slot
        self._ring, self._native = ring, native
        self._handle = native.open(uid, slot)

    @property
    def handle(self) -> int:
        return self._handle

    def enter(self, agree: int, described: bytes, blocked: int, end: int) -> Entered:
        call = self._native.enter(self._handle, agree, described, blocked, end)
        return self, call.seq, call.index, call.entered_ns, blocked, end

    def finish(self, call: Entered) -> None:
        self._native.finish(_Call(self._handle, *call[1:]), raised=False)

    def fail(self, call: Entered) -> None:
        self._native.finish(_Call(self._handle, *call[1:]), raised=True)

    def unknown(self) -> None:
        """The library sees it by the call's `End`."""

    def close(self) -> None:
        self._native.close(self._handle)
        super().close()


def planned(read: Read | None, *, timed: bool) -> list[int]:
    """What the kernel needs to know of all calls of a kind. A sequence of 0: they are not watched."""
    if read is None:
        return [0] * 9
    sequence, agree, *rest, end = read
    assert isinstance(sequence, NativeSequence)
    end = End.TIMED if timed and end == End.WORK else end
    return [
        sequence.handle,
        agree - 2 * _HALF if agree >= _HALF else agree,
        *map(int, rest),
        int(end),
    ]
